"""Activations on an OpenCL device: floats, and their roundings to int8 for products with quantised weights."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from tpi.config import Format
from tpi.devices.opencl.card import LANES, OpenClCard
from tpi.devices.opencl.programs import Program
from tpi.kernels.spec import F32, NormSpec
from tpi.pack.layout import GROUP, Part, RunLayout, is_quantised

NORMS = Program(("norms",))


class Form(NamedTuple):
    """The number format to which activations are rounded.

    With `fine` they have 15 bits (for q8 weights), else 8. With `codes` they are integers (tiled layout), else floats.
    """

    fine: bool
    codes: bool


def form_of(run: RunLayout, part: Part) -> Form | None:
    """Return the format to which a part's input is rounded; None for columns in records, which take floats."""
    if not is_quantised(part.format) or (run.layout == "record" and part.axis == "column"):
        return None
    return Form(fine_for(part.format), run.layout == "tiled")


def fine_for(format: Format) -> bool:
    """Return True if weights of a format take 15-bit activations (`tpi.kernels.arithmetic.round_activations`)."""
    return format == "q8"


@dataclass(frozen=True)
class RoundedBuffers:
    """Buffers of rounded activations.

    Attributes:
        codes, fine: `[tokens, width]` int8 or None; `fine` is in 1/128 of the unit of `codes`.
        scales: `[tokens, width / 32]` float32, the value of one unit of `fine`, or of `codes` if `fine` is None.
        sums: `[tokens, width / 32]` float32, scale times the sum of the group's codes.
        floats: `[tokens, width]` float32, if `Form.codes` is False; else None.
    """

    codes: Any = None
    fine: Any = None
    scales: Any = None
    sums: Any = None
    floats: Any = None


class CardActivations:
    """Activations on the card: a buffer of float32 `[tokens, width]`, and rounded copies made when first needed."""

    def __init__(self, card: OpenClCard, values: Any, tokens: int, width: int) -> None:
        self._card = card
        self.values = values
        self.tokens = tokens
        self.width = width
        self._forms: dict[Form, RoundedBuffers] = {}

    def rounded(self, form: Form) -> RoundedBuffers:
        """Return the values rounded to the format `form`, computed once. `width` must be a multiple of 32."""
        if form not in self._forms:
            self._forms[form] = self._round(form)
        return self._forms[form]

    def _round(self, form: Form) -> RoundedBuffers:
        card, values, groups = self._card, self.tokens * self.width, self.tokens * self.width // GROUP
        if form.codes:
            fine = card.empty(values // 4) if form.fine else None
            made = RoundedBuffers(card.empty(values // 4), fine, card.empty(groups), card.empty(groups))
        else:
            made = RoundedBuffers(floats=card.empty(values))
        buffers = (made.codes, made.fine, made.scales, made.sums, made.floats)
        work = [-(-groups * 8 // LANES)]  # eight work-items per group
        card.launch(NORMS, "round_groups", work, self.values, groups, form.fine, *buffers)
        return made


class OpenClPrepared:
    """A block's input, prepared on the card (`tpi.kernels.spec.Prepared`)."""

    def __init__(self, card: OpenClCard, activations: CardActivations) -> None:
        self.card = card
        self.activations = activations

    @property
    def shape(self) -> tuple[int, int]:
        """Number of tokens and hidden size: `(tokens, hidden)`."""
        return self.activations.tokens, self.activations.width

    def values(self) -> F32:
        """Return a copy of the normed input, `[tokens, hidden]`."""
        with self.card.working():
            return self.card.download(self.activations.values, *self.shape)


@dataclass(frozen=True)
class NormVectors:
    """The weight and bias of a norm in buffers of the card."""

    weight: Any
    bias: Any


def upload_norm(card: OpenClCard, norm: NormSpec) -> NormVectors:
    """Copy the vectors of `norm` to the card."""
    return NormVectors(card.upload(norm.weight), None if norm.bias is None else card.upload(norm.bias))


def normed(card: OpenClCard, norm: NormSpec, vectors: NormVectors, x: Any, tokens: int) -> Any:
    """Return a buffer with the norm of `x`, a buffer of float32 `[tokens, hidden]`."""
    hidden = len(norm.weight)
    out, kind = card.empty(tokens, hidden), norm.kind == "layer"
    given = (x, vectors.weight, vectors.bias, kind, float(norm.eps), hidden, out)
    card.launch(NORMS, "norm", [tokens], *given)
    return out

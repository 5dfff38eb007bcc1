"""Activations on the card: as floats, and rounded once to int8 for quantised weights."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tpi.devices.cuda.backend import Tensor, launch
from tpi.devices.cuda.programs import norms
from tpi.kernels.spec import F32
from tpi.pack.layout import GROUP

_AT_ONCE = 32  # groups that one program rounds


@dataclass(frozen=True)
class Rounded:
    """Activations rounded to int8: `codes` and `rest` `[tokens, length]`, and a scale for each group of 32.

    The values are (codes + rest / 128) * scales.
    """

    codes: Tensor
    rest: Tensor | None
    scales: Tensor


@dataclass
class Activations:
    """Activations on the card: float32 `values` `[tokens, length]`, and their cached rounded forms."""

    values: Tensor
    _kept: dict[bool, Rounded] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.values.shape[0])

    def rounded(self, rest: bool) -> Rounded:
        """Return the values rounded as `tpi.kernels.arithmetic.round_activations`; `rest` is True for q8 weights."""
        if rest not in self._kept:
            self._kept[rest] = _round(self.values, rest)
        return self._kept[rest]


def _round(values: Tensor, rest: bool) -> Rounded:
    tokens, length = values.shape
    groups = length // GROUP
    codes = torch.empty_like(values, dtype=torch.int8)
    more = torch.empty_like(codes) if rest else None
    scales = values.new_empty(tokens, groups)
    launch(
        norms.round_groups, (tokens, -(-groups // _AT_ONCE)), values, codes, codes if more is None else more, scales,
        groups, GROUPS=_AT_ONCE, REST=rest,
    )  # fmt: skip
    return Rounded(codes, more, scales)


@dataclass(frozen=True)
class CudaPrepared:
    """A block's input, prepared on the card (`tpi.kernels.spec.Prepared`)."""

    input: Activations
    bring_back: Callable[[Tensor], F32]  # a method of the kernels that made it

    @property
    def shape(self) -> tuple[int, int]:
        """Number of tokens and hidden size: `(tokens, hidden)`."""
        tokens, hidden = self.input.values.shape
        return tokens, hidden

    def values(self) -> F32:
        """Return a copy of the normed input, `[tokens, hidden]`."""
        return self.bring_back(self.input.values)


def to_host(values: Tensor) -> F32:
    """Wait until the float32 tensor `values` is computed, and return a copy of it in host memory."""
    found: F32 = values.cpu().numpy()
    return found if values.is_cuda else found.copy()

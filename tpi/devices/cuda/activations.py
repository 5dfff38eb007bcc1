"""Activations on the card: as they are, and rounded to int8 as quantised weights want them, once."""

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
    """int8 `codes` `[tokens, length]` times one of `scales` `[tokens, length / 32]` per group; 1/128 of `rest` more."""

    codes: Tensor
    rest: Tensor | None
    scales: Tensor


@dataclass
class Activations:
    """`values` is float32 `[tokens, length]`; what is rounded of it is kept."""

    values: Tensor
    _kept: dict[bool, Rounded] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """How many tokens they are of."""
        return int(self.values.shape[0])

    def rounded(self, rest: bool) -> Rounded:
        """See `tpi.kernels.arithmetic.round_activations`; with `rest` for q8."""
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
    """See `tpi.kernels.spec.Prepared`."""

    input: Activations
    bring_back: Callable[[Tensor], F32]  # a method of the kernels that made it

    @property
    def shape(self) -> tuple[int, int]:
        """`(tokens, hidden)`."""
        tokens, hidden = self.input.values.shape
        return tokens, hidden

    def values(self) -> F32:
        """See `tpi.kernels.spec.Prepared`."""
        return self.bring_back(self.input.values)


def to_host(values: Tensor) -> F32:
    """float32 of the card as an array that is the caller's own; waits until it is computed, in the lane in use."""
    found: F32 = values.cpu().numpy()
    return found if values.is_cuda else found.copy()

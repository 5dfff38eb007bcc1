"""The static description of blocks that have a state for each sequence, for a kernel (see `tpi.kernels.spec`).

A state cannot be cut back to an earlier token. Therefore a step of at most `STREAM_TOKENS` tokens, whose last ones may
be drafts, changes the stored state of a sequence by the sequence's first token only. With the state it stores the
inputs of the sequence's other, *later* tokens, at most `LATER`: those of the convolution, and the gates of the heads.
The sequence's next step says how many of the later tokens are *taken*. They change the state at the beginning of that
step, in the same arithmetic, so that a state has the same bits whether a token was drafted or not.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tpi.kernels.constants import STREAM_TOKENS
from tpi.kernels.normspec import NormSpec, SpreadNorm
from tpi.pack.layout import RunLayout

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

LATER: Final = STREAM_TOKENS - 1
"""The most later tokens of a state."""


@dataclass(frozen=True, eq=False)
class DeltaSpec:
    """The value heads of this node in one layer's gated DeltaNet; `tpi.kernels.recurrent.delta` has the formulas.

    Attributes:
        values: layout of the run with the parts `v`, `gate` (rows) and `o` (columns) of the value heads.
        keys: layout of the run with the parts `q` and `k` (rows) of the key heads.
        heads, key_heads: local value heads and key heads.
        key, value: length of a key, and of a value.
        taps: tokens that the convolution sees, the token itself included.
        key_index: `[heads]` int32, the local key head of each local value head.
        norm: norm of the input; its eps is also that of `out_norm`.
        a, b: `[heads, hidden]`.
        decay, decay_bias: `[heads]`; `decay` is negative.
        conv_q, conv_k: `[key_heads * key, taps]`; conv_v: `[heads * value, taps]`; the last tap is the token's own.
        out_norm: `[value]`.
    """

    values: RunLayout
    keys: RunLayout
    heads: int
    key_heads: int
    key: int
    value: int
    taps: int
    key_index: I32
    norm: NormSpec
    a: F32
    b: F32
    decay: F32
    decay_bias: F32
    conv_q: F32
    conv_k: F32
    conv_v: F32
    out_norm: F32

    @property
    def hidden(self) -> int:
        """Number of values of a token's hidden state."""
        return self.values.hidden

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: all queries, all keys, all values."""
        return 2 * self.key_heads * self.key + self.heads * self.value

    @property
    def state_values(self) -> int:
        """Number of float32 values of a sequence's state.

        They are: every head's S; the last inputs of the convolution and those of later tokens,
        `[taps - 1 + LATER, channels]`; the factors exp(g) and beta of later tokens, `[LATER, 2, heads]`.
        """
        return _heads_values(self)


@dataclass(frozen=True, eq=False)
class ConvSpec:
    """The channels of this node in one layer's gated short convolution; `tpi.kernels.recurrent.conv` has the formula.

    Attributes:
        values: layout of the run with the parts `v`, `input`, `gate` (rows) and `o` (columns); a vector of each part is
            a channel.
        channels: local channels; `units * width` of the run may exceed them by padding.
        norm: norm of the input.
        weights: `[channels, taps]`; the last tap is the token's own.
    """

    values: RunLayout
    channels: int
    norm: NormSpec
    weights: F32

    @property
    def taps(self) -> int:
        """Number of tokens that the convolution sees, the token itself included."""
        return int(self.weights.shape[1])

    @property
    def hidden(self) -> int:
        """Number of values of a token's hidden state."""
        return self.values.hidden

    @property
    def state_values(self) -> int:
        """Number of float32 values of a sequence's state: the last inputs and those of later tokens,
        `[taps - 1 + LATER, channels]`.
        """
        return (self.taps - 1 + LATER) * self.channels


@dataclass(frozen=True, eq=False)
class MambaSpec:
    """The heads of this node in one layer's Mamba2; `tpi.kernels.recurrent.mamba` has the formulas.

    Attributes:
        values, keys, heads, key_heads, key, value, taps, key_index, norm: as in `DeltaSpec`; x of the formulas are
            values, B are keys, C are queries.
        a: `[heads, hidden]`, the rows of the step sizes.
        decay, decay_bias, skip: `[heads]`; `decay` is negative.
        least_step, most_step: limits of the step sizes.
        conv_q, conv_k, conv_v: as in `DeltaSpec`; conv_bias: `[channels]` in the order q, k, v, or None.
        out_norm: `[heads * value]`.
        out_eps: eps of the norm of the results, which is over the heads of each key head.
        spread: the norm of the results if all heads of the model share one key head, because other nodes may have some
            of the heads; else None.
    """

    values: RunLayout
    keys: RunLayout
    heads: int
    key_heads: int
    key: int
    value: int
    taps: int
    key_index: I32
    norm: NormSpec
    a: F32
    decay: F32
    decay_bias: F32
    skip: F32
    least_step: float
    most_step: float
    conv_q: F32
    conv_k: F32
    conv_v: F32
    conv_bias: F32 | None
    out_norm: F32
    out_eps: float
    spread: SpreadNorm | None

    @property
    def hidden(self) -> int:
        """Number of values of a token's hidden state."""
        return self.values.hidden

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: all C, all B, all x."""
        return 2 * self.key_heads * self.key + self.heads * self.value

    @property
    def state_values(self) -> int:
        """Number of float32 values of a sequence's state; its order is that of `DeltaSpec.state_values`.

        The step size of a head takes the place of beta.
        """
        return _heads_values(self)


HeadsSpec = DeltaSpec | MambaSpec
RecurrentSpec = HeadsSpec | ConvSpec


def _heads_values(spec: HeadsSpec) -> int:
    return spec.heads * (spec.key * spec.value + 2 * LATER) + (spec.taps - 1 + LATER) * spec.channels

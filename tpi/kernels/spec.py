"""What a kernel is told about a block, once: its layouts, its small vectors, and which tokens a step holds.

A spec is static for one layer on one node and is compared by identity, so that an implementation may keep what it
derives from one. Head counts, units and biases are this node's own; `hidden` vectors are whole on every node.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tpi.config import Activation, Mixture, Norm
from tpi.kernels.constants import KV_GROUP, KV_RUN, PAGE_TOKENS, STREAM_TOKENS
from tpi.pack.layout import RunLayout

__all__ = [
    "F32",
    "I32",
    "KV_GROUP",
    "KV_RUN",
    "NO_TOKENS",
    "PAGE_TOKENS",
    "SHARED",
    "STREAM_TOKENS",
    "U8",
    "AttentionSpec",
    "Batch",
    "BlockSpec",
    "ChainBlock",
    "ExpertPiece",
    "ExpertsSpec",
    "FfnSpec",
    "Input",
    "KvArray",
    "LatentSpec",
    "NormSpec",
    "Prepared",
    "Projected",
    "Residual",
    "RouterSpec",
    "Routing",
    "WholeNorms",
]  # fmt: skip

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
KvArray = npt.NDArray[np.generic]
SHARED = -1
"""The number of shared experts among the pieces of a block of experts."""


@dataclass(frozen=True, eq=False)
class NormSpec:
    """The norm of a block's input: one for all of its segments, and for whatever chooses among them.

    Attributes:
        kind: `rms`: `x / sqrt(mean(x^2) + eps) * weight`; `layer`: `(x - mean) / sqrt(variance + eps) * weight + bias`.
        weight, bias: `[hidden]`; the bias belongs to LayerNorm.
    """

    kind: Norm
    eps: float
    weight: F32
    bias: F32 | None = None


@dataclass(frozen=True, eq=False)
class WholeNorms:
    """RMS norms of a token's queries, and of its keys, over the heads of all nodes at once, before RoPE (OLMoE).

    Attributes:
        q: `[heads * head_dim]`; k: `[kv_heads * head_dim]`: of this node's heads.
        counted: `[kv_heads]`: whether a KV head counts here. One that is kept on two nodes counts on one.
        q_values, k_values: how many there are on all nodes together.
    """

    q: F32
    k: F32
    counted: npt.NDArray[np.bool_]
    q_values: int
    k_values: int


@dataclass(frozen=True, eq=False)
class LatentSpec:
    """The vector that a token's keys and values come from, whole on every node (DeepSeek-V2).

    Of its values the first are normed, and are what the parts of the KV run are multiplied with; the others, rotated,
    are the first of the key of every head. The rest of a head's key comes from its `k`, its value from its `v`, with
    zeros up to `head_dim`.

    Attributes:
        run: layout of the run with the part `latent` (rows); its units come first in a segment's weights.
        norm: of the first values; its weight says how many they are.
        rope: how many are shared by all keys.
        width: vectors of each part that a KV head has in the KV run.
        bias: `[values]` or None; added before the norm.
    """

    run: RunLayout
    norm: NormSpec
    rope: int
    width: int
    bias: F32 | None = None

    @property
    def rank(self) -> int:
        """How many values are normed."""
        return len(self.norm.weight)


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """This node's heads of one layer's attention.

    Attributes:
        query: layout of the query run, parts `q` (rows) and `o` (columns); its units are padded to whole query heads.
        kv: layout of the KV run, parts `k` and `v` (rows).
        heads, kv_heads, head_dim: local heads; `units * width` of a run may exceed `heads * head_dim` by padding.
        kv_index: `[heads]` int32, the local KV head that each local query head attends to.
        norm: of the input; its eps is also that of `q_norm` and `k_norm`.
        q_bias: `[heads * head_dim]` or None; k_bias, v_bias: `[kv_heads * head_dim]` or None.
        q_norm, k_norm: `[head_dim]` or None; RMS norm of each head before RoPE (Qwen 3).
        inv_freq: `[rotary/2]`, rotary frequencies, halves rotated against each other; empty for no RoPE.
        rope_scale: multiplies cosine and sine.
        attention_scale: multiplies q.k; then softcap: `c * tanh(score / c)`, 0 for none.
        window: tokens that a token attends to, itself included; 0 for all.
        clip: the largest magnitude of queries, keys and values, before RoPE; 0 for any.
        whole: in place of `q_norm` and `k_norm`, norms of all heads at once.
        sinks: `[heads]` or None: a score of each head that is in its softmax and stands for no value (gpt-oss).
        latent: what keys and values come from, in place of the block's input.
    """

    query: RunLayout
    kv: RunLayout
    heads: int
    kv_heads: int
    head_dim: int
    kv_index: I32
    norm: NormSpec
    q_bias: F32 | None
    k_bias: F32 | None
    v_bias: F32 | None
    q_norm: F32 | None
    k_norm: F32 | None
    inv_freq: F32
    rope_scale: float
    attention_scale: float
    softcap: float
    window: int
    clip: float = 0.0
    whole: WholeNorms | None = None
    sinks: F32 | None = None
    latent: LatentSpec | None = None

    @property
    def hidden(self) -> int:
        """Values of a token's hidden state."""
        return self.query.hidden


@dataclass(frozen=True, eq=False)
class FfnSpec:
    """This node's neurons of one layer's feed-forward network (or of one expert).

    Attributes:
        neuron: layout of the neuron run, parts `gate` (rows, if gated, unless it is a run of its own), `up` (rows),
            `down` (columns).
        activation: relu2 is ReLU squared, fatrelu x where x > `threshold` and else 0; drelu is ReLU of gate and of up;
            swiglu_clamped is gate * sigmoid(`slope` * gate) * (up + 1) of a gate of at most `threshold`, and an up of
            at most that magnitude (gpt-oss).
        gated: down(act(gate) * up) rather than down(act(up)).
        norm: of the input.
        gate_bias, up_bias: `[units * width]` or None.
        gate: layout of the gate's run, where that is one of its own: its units come before the neurons' in the weights,
            and the neurons are records. Then some can be left out for what their gate comes to (`GatedKernels`).
    """

    neuron: RunLayout
    activation: Activation
    gated: bool
    norm: NormSpec
    gate_bias: F32 | None
    up_bias: F32 | None
    threshold: float = 0.0
    slope: float = 1.0
    gate: RunLayout | None = None

    @property
    def hidden(self) -> int:
        """Values of a token's hidden state."""
        return self.neuron.hidden


@dataclass(frozen=True, eq=False)
class RouterSpec:
    """How the tokens of one block choose their experts: the same on every node.

    Attributes:
        mixture: the settings.
        norm: of the block's input.
        weight: `[experts, hidden]`.
        bias: `[experts]` or None; added to the logits.
        choice: `[experts]` or None; added to the scores where experts are chosen, and only there.
        shared: `[hidden]` or None: the sigmoid of its product multiplies what shared experts come to.
    """

    mixture: Mixture
    norm: NormSpec
    weight: F32
    bias: F32 | None = None
    choice: F32 | None = None
    shared: F32 | None = None


@dataclass(frozen=True, eq=False)
class Routing:
    """What the tokens of a block chose.

    Attributes:
        experts: `[tokens, used]`, the best first.
        weights: `[tokens, used]`: what each expert's output is multiplied by.
        shared: `[tokens]` or None (1): the same for shared experts.
    """

    experts: I32
    weights: F32
    shared: F32 | None = None


@dataclass(frozen=True)
class ExpertPiece:
    """Some units of one routed expert; `begins`: its first is among them, and with it what is added once for all."""

    expert: int
    units: int
    begins: bool = True


@dataclass(frozen=True, eq=False)
class ExpertsSpec:
    """This node's neurons of one block of experts.

    The units of shared experts come first in its weights, then those of `pieces`, in their order.

    Attributes:
        routed: of all pieces' units together.
        pieces: whose they are.
        shared: of the shared experts' units, or None.
        router: what chooses among all experts of the block.
        down_bias: `[experts, hidden]` or None: what is added to the output of an expert, by the piece that begins it.
    """

    routed: FfnSpec
    pieces: tuple[ExpertPiece, ...]
    shared: FfnSpec | None
    router: RouterSpec
    down_bias: F32 | None = None

    @property
    def norm(self) -> NormSpec:
        """The norm of the block's input."""
        return self.router.norm

    @property
    def hidden(self) -> int:
        """Values of a token's hidden state."""
        return self.routed.hidden

    @property
    def units(self) -> int:
        """Units of all of it."""
        return self.routed.neuron.units + (self.shared.neuron.units if self.shared else 0)


BlockSpec = AttentionSpec | FfnSpec | ExpertsSpec


class Prepared(Protocol):
    """A block's input, normed, and rounded as its weights want it: made once, used by all of the block's segments.

    Belongs to the kernels that made it, on whose device it lies.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """`(tokens, hidden)`."""

    def values(self) -> F32:
        """A copy of what was normed, `[tokens, hidden]`: for routers, predictors, and the kernels of another device."""


Input = F32 | Prepared  # of a block: `[tokens, hidden]` as it is, or what was prepared of it


@dataclass(frozen=True, eq=False)
class Projected:
    """The heads of some tokens, float32, with biases and norms, queries and keys rotated.

    Attributes:
        queries: `[tokens, heads, head_dim]`.
        keys, values: `[tokens, kv_heads, head_dim]`, not yet in any cache.
    """

    queries: F32
    keys: F32
    values: F32


@dataclass(frozen=True, eq=False)
class Residual:
    """What every node does with the sum of all partials: bias, optional norm (Gemma 2), and the residual connection.

    Attributes:
        bias: `[hidden]` or None.
        norm: of sum and bias, or None.
    """

    bias: F32 | None = None
    norm: NormSpec | None = None


@dataclass(frozen=True, eq=False)
class ChainBlock:
    """A block of a node that has the whole model in memory: what a chain is made of.

    Attributes:
        data: the block's weights, which must stay where they are.
        keys, values: one layer of `tpi.kv.KvPages`; None for a block that does not attend.
    """

    spec: BlockSpec
    data: U8
    residual: Residual
    keys: KvArray | None = None
    values: KvArray | None = None


@dataclass(frozen=True, eq=False)
class Batch:
    """Which tokens a step holds, and where their keys and values live.

    Attributes:
        positions: `[tokens]` int32, each token's position in its sequence.
        sequence: `[tokens]` int32, each token's row of `tables`.
        tables: `[sequences, max_blocks]` int32, page ids in order; entries past a sequence's end are not read. The
            blocks that a sequence's new tokens go into stand in no other row.
    """

    positions: I32
    sequence: I32
    tables: I32

    def cut(self, tokens: slice) -> "Batch":
        """Some of the tokens; what they attend to before them must have been computed."""
        return Batch(self.positions[tokens], self.sequence[tokens], self.tables)


NO_TOKENS = Batch(np.empty(0, np.int32), np.empty(0, np.int32), np.empty((0, 0), np.int32))

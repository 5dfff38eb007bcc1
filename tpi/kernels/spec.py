"""The static description of a block for a kernel (layouts and small vectors), and of the tokens of a step.

A spec is static for one layer on one node and is compared by identity, so that an implementation may cache what it
derives from a spec. Head counts, units and biases are this node's own; `hidden` vectors are whole on every node.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tpi.config import Activation, Mixture
from tpi.kernels.constants import KV_GROUP as KV_GROUP
from tpi.kernels.constants import KV_RUN as KV_RUN
from tpi.kernels.constants import KV_WORD as KV_WORD
from tpi.kernels.constants import PAGE_TOKENS as PAGE_TOKENS
from tpi.kernels.constants import STREAM_TOKENS as STREAM_TOKENS
from tpi.kernels.normspec import LatentSpec as LatentSpec
from tpi.kernels.normspec import NormSpec as NormSpec
from tpi.kernels.normspec import QueryLatentSpec as QueryLatentSpec
from tpi.kernels.normspec import SpreadNorm as SpreadNorm
from tpi.kernels.normspec import WholeNorms as WholeNorms
from tpi.kernels.recurrent.spec import LATER as LATER
from tpi.kernels.recurrent.spec import ConvSpec as ConvSpec
from tpi.kernels.recurrent.spec import DeltaSpec as DeltaSpec
from tpi.kernels.recurrent.spec import HeadsSpec as HeadsSpec
from tpi.kernels.recurrent.spec import MambaSpec as MambaSpec
from tpi.kernels.recurrent.spec import RecurrentSpec as RecurrentSpec
from tpi.pack.layout import RunLayout

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
KvArray = npt.NDArray[np.generic]
SHARED = -1
"""The number that stands for the shared experts among the pieces of a block of experts."""


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """The heads of this node in one layer's attention.

    Attributes:
        query: layout of the query run, parts `q` (rows; not with `query_latent`) and `o` (columns); its units are
            padded to whole query heads.
        kv: layout of the KV run, parts `k` and `v` (rows).
        heads, kv_heads, head_dim: local heads; `units * width` of a run may exceed `heads * head_dim` by padding.
        kv_index: `[heads]` int32, the local KV head that each local query head attends to.
        norm: norm of the input; its eps is also that of `q_norm`, `k_norm` and `v_norm`.
        q_bias: `[heads * head_dim]` or None; k_bias, v_bias: `[kv_heads * head_dim]` or None.
        q_norm, k_norm: `[head_dim]` or None; RMS norm of each head before RoPE (Qwen 3).
        late_norms: True if `q_norm` and `k_norm` come after RoPE (Hunyuan).
        inv_freq: `[rotary/2]`, rotary frequencies, halves rotated against each other; empty for no RoPE.
        rope_scale: factor of cosine and sine.
        attention_scale: factor of q.k; then softcap: `c * tanh(score / c)`, 0 for none.
        window: tokens that a token attends to, itself included; 0 for all.
        clip: largest magnitude of queries, keys and values, before RoPE; 0 for no limit.
        growth, growth_tokens: queries are multiplied by `1 + growth * ln(1 + position // growth_tokens)` (Ministral 3).
        whole: norms of all heads at once, in place of `q_norm` and `k_norm`.
        sinks: `[heads]` or None: a score of each head that takes part in its softmax without a value (gpt-oss).
        latent: source of keys and values in place of the block's input, or None.
        query_latent: source of queries in place of the block's input, or None; not without `latent`.
        v_norm: `[head_dim]` or None; RMS norm of each value, with the weights 1 in Gemma 4.
        shared: True if the keys and values in the pages are those of an earlier layer; `kv` is then empty.
        output_gate: True if the query run has a part `gate` (rows) in addition to q. The sigmoid of its product with
            the input multiplies the result of a head's attention, before o.
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
    query_latent: QueryLatentSpec | None = None
    output_gate: bool = False
    v_norm: F32 | None = None
    growth: float = 0.0
    growth_tokens: int = 0
    late_norms: bool = False
    shared: bool = False

    @property
    def hidden(self) -> int:
        """Number of values of a token's hidden state."""
        return self.query.hidden


@dataclass(frozen=True, eq=False)
class FfnSpec:
    """The neurons of this node in one layer's feed-forward network (or in one expert).

    Attributes:
        neuron: layout of the neuron run, parts `gate` (rows, if gated), `up` (rows), `down` (columns).
        activation: relu2 is ReLU squared. fatrelu is x where x > `threshold`, else 0. drelu is ReLU of gate and of up.
            swiglu_clamped is gate * sigmoid(`slope` * gate) * (up + 1), with gate at most `threshold` and the
            magnitude of up at most `threshold` (gpt-oss).
        gated: True for down(act(gate) * up), False for down(act(up)).
        norm: norm of the input.
        gate_bias, up_bias: `[units * width]` or None.
    """

    neuron: RunLayout
    activation: Activation
    gated: bool
    norm: NormSpec
    gate_bias: F32 | None
    up_bias: F32 | None
    threshold: float = 0.0
    slope: float = 1.0

    @property
    def hidden(self) -> int:
        """Number of values of a token's hidden state."""
        return self.neuron.hidden


@dataclass(frozen=True, eq=False)
class RouterSpec:
    """The choice of experts for the tokens of one block; equal on every node."""

    mixture: Mixture
    norm: NormSpec
    weight: F32
    bias: F32 | None = None
    choice: F32 | None = None
    shared: F32 | None = None
    factors: F32 | None = None


@dataclass(frozen=True, eq=False)
class Routing:
    """The experts that the tokens of a block chose.

    Attributes:
        experts: `[tokens, used]`, the best first.
        weights: `[tokens, used]`: factor of each expert's output.
        shared: `[tokens]` or None (1): factor of the shared experts' output.
    """

    experts: I32
    weights: F32
    shared: F32 | None = None


@dataclass(frozen=True)
class ExpertPiece:
    """Some units of one routed expert. If `begins`, they include its first unit, and the piece adds its bias."""

    expert: int
    units: int
    begins: bool = True


@dataclass(frozen=True, eq=False)
class ExpertsSpec:
    """The neurons of this node in one block of experts.

    The units of shared experts come first in its weights, then those of `pieces`, in their order.

    Attributes:
        routed: spec of all pieces' units together.
        pieces: the expert and the units of each piece.
        shared: spec of the shared experts' units, or None.
        router: choice among all experts of the block.
        down_bias: `[experts, hidden]` or None; added to an expert's output by the piece that begins it.
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
        """Number of values of a token's hidden state."""
        return self.routed.hidden

    @property
    def units(self) -> int:
        """Units of all pieces and of the shared experts."""
        return self.routed.neuron.units + (self.shared.neuron.units if self.shared else 0)


BlockSpec = AttentionSpec | RecurrentSpec | FfnSpec | ExpertsSpec


class Prepared(Protocol):
    """A block's input, normed, and rounded as its weights need it: made once, used by all of the block's segments.

    It lies on the device of the kernels that made it, and only they can use it.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """Number of tokens and hidden size: `(tokens, hidden)`."""

    def values(self) -> F32:
        """Return a copy of the normed input, `[tokens, hidden]`, for routers, predictors and other devices."""


Input = F32 | Prepared  # a block's input: raw `[tokens, hidden]`, or prepared


@dataclass(frozen=True, eq=False)
class Projected:
    """The heads of some tokens in float32, after biases and norms; queries and keys are rotated (RoPE).

    Attributes:
        queries: `[tokens, heads, head_dim]`.
        keys, values: `[tokens, kv_heads, head_dim]`, not yet in any cache.
        gate: `[tokens, heads * head_dim]`, of heads with an output gate (before the sigmoid); else None.
    """

    queries: F32
    keys: F32
    values: F32
    gate: F32 | None = None


@dataclass(frozen=True, eq=False)
class StackedNorms:
    """Norms of a dense feed-forward block and a block of experts, which share one allreduce (Gemma 4).

    The sum is `[2 * tokens, hidden]`: the rows of the dense block, then those of the experts.

    Attributes:
        first: norm of the dense block's rows.
        both: norm of the two results added together, after each has been normed.
    """

    first: NormSpec
    both: NormSpec


@dataclass(frozen=True, eq=False)
class PerLayerSpec:
    """The end of a layer that adds the embedding of each token for this layer to the hidden states (Gemma 4 E2B).

    `x` becomes `x + norm(projection(act(gate(x)) * embedding))`. Every node computes it, without a sum.

    Attributes:
        gate: `[values, hidden]`.
        projection: `[hidden, values]`.
        norm: norm of the result.
        activate: settings of the activation of the gate.
        first: number of the first value of this layer in `Batch.per_layer`.
        scale: multiplies the hidden states at the end.
    """

    gate: F32
    projection: F32
    norm: NormSpec
    activate: FfnSpec
    first: int
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class Residual:
    """The end of a block on every node, after the allreduce: bias, optional norm (Gemma 2) and residual connection.

    Attributes:
        bias: `[hidden]` or None.
        norm: norm of sum plus bias, or None; with `stacked`, norm of the experts' rows of the sum.
        stacked: the other norms if a dense block and a block of experts share the sum, or None.
        scale: multiplies the hidden states after the addition (Gemma 4, in the last block of a layer).
        spread: the norm of the results of all nodes' heads, or None. If it is set, the sum has additional rows:
            the sums of squares of these results (`tpi.kernels.recurrent.squares`).
        per_layer: what the token's embedding for this layer adds after the addition, or None.
    """

    bias: F32 | None = None
    norm: NormSpec | None = None
    scale: float = 1.0
    stacked: StackedNorms | None = None
    spread: SpreadNorm | None = None
    per_layer: PerLayerSpec | None = None


@dataclass(frozen=True, eq=False)
class ChainBlock:
    """A block of a chain (`Kernels.open_chain`), on a node that holds the whole model in memory.

    Attributes:
        data: the block's weights, which must stay where they are.
        keys, values: one layer of `tpi.kernels.kv.KvPages`; None for a block that does not attend.
        states: one layer of `tpi.kernels.kv.States`; None for a block without a state.
    """

    spec: BlockSpec
    data: U8
    residual: Residual
    keys: KvArray | None = None
    values: KvArray | None = None
    states: F32 | None = None


@dataclass(frozen=True, eq=False)
class Batch:
    """The tokens of a step, and the pages of their keys and values.

    Attributes:
        positions: `[tokens]` int32, each token's position in its sequence.
        sequence: `[tokens]` int32, each token's row of `tables`.
        tables: `[sequences, max_blocks]` int32, page ids in order; entries past a sequence's end are not read. Pages
            that a sequence's new tokens are written to may not occur in another row.
        states: `[sequences, 4]` int32, for models with recurrent layers: the state that each sequence continues from
            (-1: zeros); the state that the step writes, which no other row may read or write; how many of the later
            tokens stored with the first state are taken; how many of the step's last tokens are stored with the second
            as later tokens, which may not be all (`tpi.kernels.recurrent.spec`).
        per_layer: `[tokens, values]` float32, the embedding of each token for each layer, layer after layer; None for
            models without such embeddings.
    """

    positions: I32
    sequence: I32
    tables: I32
    states: I32 | None = None
    per_layer: F32 | None = None

    def cut(self, tokens: slice) -> "Batch":
        """Return a batch of the given `tokens` alone. Earlier tokens of their sequences must have been computed.

        In the returned batch, the recurrent state of a sequence is the one after its last token.
        """
        states = self.states
        if states is not None:
            begun = np.isin(np.arange(len(states)), self.sequence[: tokens.start or 0])
            read, write, taken, _ = states.T
            none = np.zeros_like(taken)
            states = np.stack([np.where(begun, write, read), write, np.where(begun, none, taken), none], axis=1)
        own = None if self.per_layer is None else self.per_layer[tokens]
        return Batch(self.positions[tokens], self.sequence[tokens], self.tables, states, own)


NO_TOKENS = Batch(np.empty(0, np.int32), np.empty(0, np.int32), np.empty((0, 0), np.int32))

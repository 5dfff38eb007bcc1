"""A run of a model over text, layer by layer on one machine, in which the caller computes feed-forward networks.

It is used for calibration and profiling. All sequences pass one layer before the next layer's weights are read, so
that only one layer needs to fit into memory. Attention uses the pack's weights and the given kernels. A `FeedForward`
callback returns the output of each feed-forward network.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tpi.block import Joining, attention_spec, embedded, experts_spec, ffn_spec, join, joining, recurrent_spec, residual
from tpi.config import RECURRENT, ModelConfig
from tpi.errors import ModelError
from tpi.kernels import Kernels
from tpi.kernels.arithmetic import activate, biased
from tpi.kernels.kv import KvPages, pages_for
from tpi.kernels.spec import Batch, FfnSpec, Routing
from tpi.pack.layout import RunLayout
from tpi.pack.reader import Pack, PackBlock
from tpi.partition import Range

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class FfnWeights:
    """One layer's feed-forward network in float32: `gate` (or None), `up` and `down` are `[neurons, hidden]`."""

    spec: FfnSpec
    gate: F32 | None
    up: F32
    down: F32

    def gated(self, x: F32) -> F32:
        """Return the activation function of the gate, `[tokens, neurons]`, for the normalised input `x`.

        In a network without a gate, the activation function is applied to up instead.
        """
        first = self.up if self.gate is None else self.gate
        bias = self.spec.up_bias if self.gate is None else self.spec.gate_bias
        product = biased(x @ first.T, bias)
        return activate(self.spec, None, product)

    def inner(self, x: F32) -> F32:
        """Return the values that are multiplied by down, `[tokens, neurons]`, for the normalised input `x`."""
        up = biased(x @ self.up.T, self.spec.up_bias)
        return activate(self.spec, None if self.gate is None else biased(x @ self.gate.T, self.spec.gate_bias), up)

    def active(self, x: F32) -> npt.NDArray[np.bool_]:
        """Return a mask of the neurons that are not 0 for the normalised input `x`: bool `[tokens, neurons]`.

        The gate alone decides, except with dReLU, where gate and up decide together.
        """
        return np.asarray((self.inner(x) if self.spec.activation == "drelu" else self.gated(x)) != 0)


FeedForward = Callable[[int, FfnWeights, F32], F32]
"""Callback that receives a layer's number, its weights and its normalised input `[tokens, hidden]`, and returns the
output `[tokens, hidden]` before bias and residual."""


def dense(layer: int, weights: FfnWeights, x: F32) -> F32:
    """Return the output of a feed-forward network with all its neurons, `[tokens, hidden]`."""
    return np.asarray(weights.inner(x) @ weights.down, np.float32)


def replay(
    pack: Pack,
    tokens: I32,
    kernels: Kernels,
    feed_forward: FeedForward = dense,
    chosen: Callable[[int, Routing], None] | None = None,
) -> F32:
    """Return the hidden states after the last layer, `[sequences * length, hidden]`, of `tokens` `[sequences, length]`.

    `feed_forward` computes the feed-forward networks. `chosen` is called for each layer with the experts that the
    tokens chose.

    Raises:
        ModelError: if a layer has experts and `chosen` is None.
    """
    config = pack.config.for_context(tokens.shape[1])
    x = embedded(config, kernels.gather(*read_table(pack.embedding), tokens.reshape(-1)))
    batch = _batch(tokens)
    if pack.positions:
        x = x + kernels.gather(*read_table(pack.positions), batch.positions + np.int32(config.position_offset))
    before: tuple[Joining, F32] | None = None
    for layer, blocks in enumerate(pack.layers):
        for block in blocks:
            vectors = block.vectors()
            x = np.ascontiguousarray(x, np.float32)
            if block.kind == "attention":
                total = _attend(config, layer, block, x, batch, kernels)
            elif block.kind in RECURRENT:
                total = _recur(config, block, x, batch, kernels)
            elif block.kind == "ffn":
                weights = read_ffn(config, block, kernels)
                total = feed_forward(layer, weights, kernels.norm(weights.spec.norm, x))
            elif chosen is not None:
                total, routing = _pass_experts(config, block, x, kernels)
                chosen(layer, routing)
            else:
                raise ModelError(f"a block of kind {block.kind} cannot be replayed; take a model without experts")
            if how := joining(config, block.kind):
                before = how, total  # this block and the next run in parallel: one residual takes both sums
                continue
            if before is not None:
                total, before = join(before[0], before[1], total), None
            x = kernels.add_residual(residual(config, block.kind, vectors), x, total)
    return x


def _pass_experts(config: ModelConfig, block: PackBlock, x: F32, kernels: Kernels) -> tuple[F32, Routing]:
    """Return the output of a block of experts for `x` `[tokens, hidden]`, and the experts chosen for each token."""
    layouts = {run.name: run for run in block.shape.runs}
    neuron, shared = layouts["neuron"], layouts.get("shared")
    shared_run = None if shared is None else (shared, Range(0, shared.units))
    spec = experts_spec(config, neuron, [Range(0, neuron.units)], shared_run, block.vectors())
    prepared = kernels.prepare(spec, x)
    routing = kernels.route(spec.router, prepared)
    held = [_units(block, run) for run in (shared, neuron) if run is not None]
    data = held[0] if len(held) == 1 else np.concatenate(held)
    return kernels.experts(spec, data, prepared, routing), routing


def read_ffn(config: ModelConfig, block: PackBlock, kernels: Kernels) -> FfnWeights:
    """Read a feed-forward block as float32, without its padding."""
    run, count = block.run("neuron"), config.intermediate
    spec = ffn_spec(config, run, block.vectors(), Range(0, run.units))
    biases = (None if bias is None else bias[:count] for bias in (spec.gate_bias, spec.up_bias))
    gate_bias, up_bias = biases
    cut = replace(spec, gate_bias=gate_bias, up_bias=up_bias)
    data = _units(block, run)
    parts = {part.name: kernels.dequantise(run, data, part.name)[:count] for part in run.parts}
    return FfnWeights(cut, parts.get("gate"), parts["up"], parts["down"])


def read_table(block: PackBlock) -> tuple[RunLayout, U8]:
    """Return the layout and the bytes of a table's rows."""
    return block.run("row"), _units(block, block.run("row"))


def cut_sequences(ids: Sequence[int], length: int, most: int = 1 << 30) -> I32:
    """Cut a text's token ids into sequences `[sequences, length]`, at most `most` of them, and drop the remainder.

    Raises:
        ModelError: if the text has fewer than `length` tokens.
    """
    count = min(len(ids) // length, most)
    if not count:
        raise ModelError(f"a text of {len(ids)} tokens is too short; give one of at least {length}")
    return np.asarray(ids[: count * length], np.int32).reshape(count, length)


def _attend(config: ModelConfig, layer: int, block: PackBlock, x: F32, batch: Batch, kernels: Kernels) -> F32:
    *latents, query, kv = block.shape.runs
    units = Range(0, query.units), Range(0, kv.units)
    spec = attention_spec(config, layer, query, kv, block.vectors(), *units, latents)
    pages = KvPages.allocate([layer], batch.tables.size, spec.kv_heads, spec.head_dim, "f32")
    data = np.concatenate([_units(block, run) for run in block.shape.runs])
    return kernels.attention(spec, data, x, pages.keys[layer], pages.values[layer], batch)


def _recur(config: ModelConfig, block: PackBlock, x: F32, batch: Batch, kernels: Kernels) -> F32:
    spec = recurrent_spec(config, [(run, Range(0, run.units)) for run in block.shape.runs], block.vectors())
    count = len(batch.tables)
    slots = np.zeros((count, 4), np.int32)
    slots[:, 0], slots[:, 1] = -1, np.arange(count)
    data = np.concatenate([_units(block, run) for run in block.shape.runs])
    return kernels.recur(spec, data, x, np.zeros((count, spec.state_values), np.float32), replace(batch, states=slots))


def _units(block: PackBlock, run: RunLayout) -> U8:
    return block.read_units(run.name, 0, run.units).reshape(-1)


def _batch(tokens: I32) -> Batch:
    sequences, length = tokens.shape
    pages = pages_for(length)
    return Batch(
        np.tile(np.arange(length, dtype=np.int32), sequences),
        np.repeat(np.arange(sequences, dtype=np.int32), length),
        np.arange(sequences * pages, dtype=np.int32).reshape(sequences, pages),
    )

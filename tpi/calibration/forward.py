"""A run of a model's float weights over a text, block by block, which yields the importance of each block's weights.

Weights are read from the source when they are computed. Besides the hidden states, memory holds a whole attention or
recurrent block, one expert, or `SEGMENT_BYTES` of a feed-forward block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tpi.block import (
    Joining,
    Vectors,
    attention_spec,
    embedded,
    experts_spec,
    ffn_spec,
    join,
    joining,
    recurrent_spec,
    residual,
)
from tpi.calibration.floats import FloatReader
from tpi.calibration.inputs import Inputs
from tpi.config import RECURRENT, ModelConfig
from tpi.kernels import open_kernels
from tpi.kernels.arithmetic import observed
from tpi.kernels.kv import KvPages, pages_for
from tpi.kernels.mixture import Normed
from tpi.kernels.perlayer import add_per_layer, layer_embeddings
from tpi.kernels.reference import ReferenceKernels
from tpi.kernels.spec import SHARED, AttentionSpec, Batch, KvArray, NormSpec, Projected
from tpi.pack.builder.plan import BlockRecipe, PackPlan
from tpi.pack.builder.writer import Importance
from tpi.pack.layout import RunLayout
from tpi.partition import Range
from tpi.sources.base import Source

F32 = npt.NDArray[np.float32]
SEGMENT_BYTES = 64 << 20  # bytes of a feed-forward block, as floats, that are computed at once


def importances(config: ModelConfig, plan: PackPlan, source: Source, tokens: Sequence[int]) -> Iterator[Importance]:
    """Yield the importance of the weights of each block of each layer, in order of use.

    Args:
        config: configuration of the model.
        plan: the plan of the pack.
        source: the model's files.
        tokens: token ids of a text, at most as many as the model's context.

    Raises:
        ModelError: if a tensor is missing or of the wrong shape.
    """
    run = Run(config, plan, source, tokens)
    for layer, blocks in enumerate(plan.layers):
        for block in blocks:
            yield run.block(layer, block)


class _Kernels(ReferenceKernels):
    """The reference kernels, which can be observed, with the native attention, which is faster."""

    def __init__(self) -> None:
        self._native = open_kernels()

    def attend(self, spec: AttentionSpec, projected: Projected, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """Append keys and values to the cache, then return the attention of all heads, `[tokens, heads * head_dim]`."""
        return self._native.attend(spec, projected, keys, values, batch)


class Run:
    """The hidden states of a text, `x`, on their way through the blocks; float32 `[tokens, hidden]`."""

    def __init__(self, config: ModelConfig, plan: PackPlan, source: Source, tokens: Sequence[int]) -> None:
        """Embed `tokens`; the other arguments are those of `importances`."""
        self._config, self._plan = config.for_context(len(tokens)), plan
        self._reader, self._kernels = FloatReader(source), _Kernels()
        pages = np.arange(pages_for(len(tokens)), dtype=np.int32)[None]
        order, states = np.arange(len(tokens), dtype=np.int32), np.array([[-1, 0, 0, 0]], np.int32)
        self._batch = Batch(order, np.zeros_like(order), pages, states)
        self._pages: dict[int, KvPages] = {}  # by the layer whose keys and values they hold
        self._before: tuple[Joining, F32] | None = None  # the result of a block that shares its sum with the next
        self.x = self._embedded(tokens)
        if plan.per_layer:
            self._batch = replace(self._batch, per_layer=self._layer_embeddings(tokens))

    def block(self, layer: int, block: BlockRecipe) -> Importance:
        """Compute a block of `layer` and return the importance of its weights."""
        vectors, x, kernels = self._reader.vectors(block), self.x, self._kernels
        if block.kind == "attention":
            total, inputs = self._attend(layer, block, vectors)
        elif block.kind in RECURRENT:
            total, inputs = self._recur(block, vectors)
        elif block.kind == "ffn":
            total, inputs = self._feed_forward(layer, block, vectors)
        else:
            total, inputs = self._experts(block, vectors)
        if how := joining(self._config, block.kind):
            self._before = how, total
        else:
            if self._before is not None:
                total, self._before = join(*self._before, total), None
            after = residual(self._config, block.kind, vectors, layer)
            x = kernels.add_residual(after, x, total)
            if after.per_layer is not None:
                x = add_per_layer(kernels, after.per_layer, x, self._batch.per_layer)
            self.x = np.ascontiguousarray(x, np.float32)
        return inputs.importance(block, self._reader)

    def _embedded(self, tokens: Sequence[int]) -> F32:
        """Return the first hidden states, `[tokens, hidden]`."""
        x = embedded(self._config, self._reader.rows(self._plan.embedding, tokens))
        if self._plan.positions is not None:
            x = x + self._reader.rows(
                self._plan.positions, (self._batch.positions + self._config.position_offset).tolist()
            )
        return np.ascontiguousarray(x, np.float32)

    def _layer_embeddings(self, tokens: Sequence[int]) -> F32:
        """Return `Batch.per_layer` of the tokens."""
        table, projection = self._plan.per_layer
        (run,) = projection.runs
        projected = self._kernels.logits(self._reader.layout(run), self._reader.units(run), self.x)
        weight = self._reader.vectors(self._plan.final)["per_layer.first_norm"]
        norm = NormSpec("rms", self._config.norm_eps, weight)
        return layer_embeddings(self._kernels, self._config, norm, self._reader.rows(table, tokens), projected)

    def _attend(self, layer: int, block: BlockRecipe, vectors: Vectors) -> tuple[F32, Inputs]:
        kept = self._config.kv_layer(layer)
        layouts, source = self._layouts(block), self._plan.layers[kept][0]
        if kept != layer:  # the layout of the keys and values that the layer reads
            layouts.append(self._reader.layout(next(run for run in source.runs if run.layout.name == "kv")))
        *latents, query, kv = layouts
        spec = attention_spec(self._config, layer, query, kv, vectors, _all(query), _all(kv), latents)
        if kept not in self._pages:
            if not self._config.shared_kv:
                self._pages.clear()
            self._pages[kept] = KvPages.allocate([kept], self._batch.tables.size, spec.kv_heads, spec.head_dim, "f32")
        inputs, pages = Inputs(self._kernels.norm(spec.norm, self.x)), self._pages[kept]
        data = np.concatenate([self._reader.units(run) for run in block.runs])
        with observed(inputs):
            found = self._kernels.attention(spec, data, self.x, pages.keys[kept], pages.values[kept], self._batch)
        return found, inputs

    def _recur(self, block: BlockRecipe, vectors: Vectors) -> tuple[F32, Inputs]:
        spec = recurrent_spec(self._config, [(run, _all(run)) for run in self._layouts(block)], vectors)
        inputs = Inputs(self._kernels.norm(spec.norm, self.x))
        data = np.concatenate([self._reader.units(run) for run in block.runs])
        with observed(inputs):
            states = np.zeros((1, spec.state_values), np.float32)
            return self._kernels.recur(spec, data, self.x, states, self._batch), inputs

    def _feed_forward(self, layer: int, block: BlockRecipe, vectors: Vectors) -> tuple[F32, Inputs]:
        (run,), config = block.runs, self._config.at_layer(layer)
        layout = self._reader.layout(run)
        normed = self._kernels.norm(ffn_spec(config, layout, vectors, Range(0, 0)).norm, self.x)
        inputs, total = Inputs(normed), np.zeros_like(self.x)
        step = max(1, SEGMENT_BYTES // layout.unit_bytes)
        for first in range(0, layout.units, step):
            units = Range(first, min(first + step, layout.units))
            data = self._reader.units(run, 0, units.first, units.last)
            with observed(inputs):
                total += self._kernels.ffn(ffn_spec(config, layout, vectors, units), data, Normed(normed))
        return total, inputs

    def _experts(self, block: BlockRecipe, vectors: Vectors) -> tuple[F32, Inputs]:
        runs = {run.layout.name: run for run in block.runs}
        routed, shared = runs["neuron"], runs.get("shared")
        layout = self._reader.layout(routed)
        beside = self._reader.layout(shared) if shared else None
        spec = experts_spec(self._config, layout, [_all(layout)], (beside, _all(beside)) if beside else None, vectors)
        prepared = self._kernels.prepare(spec, self.x)
        routing = self._kernels.route(spec.router, prepared)
        inputs, total = Inputs(prepared.normed), np.zeros_like(self.x)
        with observed(inputs):
            if shared is not None:
                weights = {SHARED: self._reader.units(shared)}
                total += self._kernels.expert_pieces(spec, weights, prepared, routing)
            for expert in np.unique(routing.experts).tolist():
                inputs.piece = expert
                weights = {expert: self._reader.units(routed, expert)}
                total += self._kernels.expert_pieces(spec, weights, prepared, routing)
        return total, inputs

    def _layouts(self, block: BlockRecipe) -> list[RunLayout]:
        return [self._reader.layout(run) for run in block.runs]


def _all(run: RunLayout) -> Range:
    return Range(0, run.units)

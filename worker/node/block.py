"""Blocks and their segments as a node computes them: a partial result per segment, the rest after the sum.

A block knows what all its segments have in common; a segment, its units' static shape (a kernel spec). The weights are
handed in for each call as one buffer of bytes, because they come and go. No I/O here, and nothing of ranks or sockets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from scheduler.weights import Wanted
from tpi.block import Vectors, attention_spec, ffn_spec
from tpi.config import ModelConfig
from tpi.kernels import Kernels
from tpi.kernels.spec import AttentionSpec, Batch, ChainBlock, FfnSpec, KvArray, Residual
from tpi.kv import PagedKV
from tpi.pack.layout import RunLayout, RunName
from tpi.partition import Range

F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Block:
    """The attention or feed-forward half of a layer: what its segments have in common."""

    number: int  # in order of use
    name: str
    residual: Residual

    def wanted(self, parts: Sequence["MicroBatch"]) -> Wanted:
        """Which of its units a visit needs: all, since it is dense."""
        return None


class MicroBatch:
    """Some of the tokens of a step on their way through the blocks."""

    def __init__(self, x: F32, batch: Batch) -> None:
        self.x = x
        self.batch = batch
        self.awaits: Block | None = None  # whose sum is on its way
        self._partial: F32 | None = None

    def add(self, partial: F32) -> None:
        """Add what one segment came to."""
        self._partial = partial if self._partial is None else np.add(self._partial, partial, out=self._partial)

    def take(self, block: Block) -> F32:
        """The partial result of all segments of `block`, whose sum is awaited from now on."""
        assert self._partial is not None
        self.awaits = block
        return self._partial

    def summed(self, total: F32 | None, kernels: Kernels) -> None:
        """The sum is there, or is for another node."""
        assert self.awaits is not None
        if total is not None:
            self.x = kernels.add_residual(self.awaits.residual, self.x, total)
        self._partial = self.awaits = None


class Segment(Protocol):
    """Some of a block's units on one device."""

    def partial(self, data: Bytes, part: MicroBatch) -> F32:
        """Output of these units, `[tokens, hidden]`, before the sum."""
        ...

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """The segment as a part of a chain, where it is all of its block."""
        ...


@dataclass(frozen=True)
class AttentionSegment:
    """Query heads, and the KV heads that they attend to; `keys` and `values` are one layer's pages."""

    kernels: Kernels
    spec: AttentionSpec
    keys: KvArray
    values: KvArray

    def partial(self, data: Bytes, part: MicroBatch) -> F32:
        """See `Segment.partial`; appends this step's keys and values to the pages."""
        if self.spec.heads == 0:
            return np.zeros_like(part.x)
        return self.kernels.attention(self.spec, data, part.x, self.keys, self.values, part.batch)

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """See `Segment.chained`."""
        return ChainBlock(self.spec, data, residual, self.keys, self.values)


@dataclass(frozen=True)
class FfnSegment:
    """Feed-forward neurons."""

    kernels: Kernels
    spec: FfnSpec

    def partial(self, data: Bytes, part: MicroBatch) -> F32:
        """See `Segment.partial`."""
        if self.spec.neuron.units == 0:
            return np.zeros_like(part.x)
        return self.kernels.ffn(self.spec, data, part.x)

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """See `Segment.chained`."""
        return ChainBlock(self.spec, data, residual)


Runs = Mapping[RunName, tuple[RunLayout, Range]]
"""The layout of each of a block's whole runs, and the units of it that a segment has."""


def open_segment(
    kernels: Kernels, config: ModelConfig, layer: int, runs: Runs, vectors: Vectors, pages: PagedKV
) -> Segment:
    """The segment of a block of `layer` that has these units; `vectors` are the block's, whole."""
    if "neuron" in runs:
        layout, units = runs["neuron"]
        return FfnSegment(kernels, ffn_spec(config, layout, vectors, units))
    (query, query_units), (kv, kv_units) = runs["query"], runs["kv"]
    spec = attention_spec(config, layer, query, kv, vectors, query_units, kv_units)
    return AttentionSegment(kernels, spec, pages.keys[layer], pages.values[layer])

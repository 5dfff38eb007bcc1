"""A chain of blocks on a card: hidden states stay there from block to block, and short steps are replayed.

The launches of a step depend only on its shape. So the second step of a shape is recorded (as a CUDA graph), and later
ones are replayed: one call on the host in place of several hundred.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from tpi.devices.checks import check_batch, check_positions
from tpi.devices.cuda.activations import Activations, to_host
from tpi.devices.cuda.attention import CardBatch
from tpi.devices.cuda.backend import RecordingStream, Tensor, power
from tpi.devices.cuda.blocks import SpecVectors, attend, feed_forward, norm, output, project
from tpi.devices.cuda.memory import CardMemory
from tpi.kernels.arithmetic import check_input
from tpi.kernels.spec import F32, I32, I64, PAGE_TOKENS, AttentionSpec, Batch, ChainBlock, FfnSpec, Residual
from tpi.trace import clock

_SHAPES = 24  # shapes whose launches are kept; a recorded step of 32 layers takes a few MB of the card
_LONGEST = 64  # tokens of the longest step that is recorded

Shape = tuple[int, int, int, int]
"""Tokens, sequences, and entries of a page table of a step, and pages that its tokens attend to at most."""
Step = Callable[[Tensor, CardBatch], Tensor]
"""Computes one block with its residual connection: the hidden states before it, and those after it."""


@dataclass
class _Recorded:
    """The tensors that a step of one shape reads and writes, and the function that computes it from them."""

    x: Tensor
    numbers: Tensor  # positions, sequence and tables, one after the other
    out: Tensor
    batch: CardBatch
    replay: Callable[[], object] | None = None


class CudaChain:
    """A chain (`tpi.kernels.Chain`) of plain attention and dense feed-forward blocks in a card's memory."""

    def __init__(
        self,
        blocks: Sequence[ChainBlock],
        memory: CardMemory,
        vectors: SpecVectors,
        lane: RecordingStream,
        working: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Create the chain; `blocks` must satisfy `tpi.kernels.chain.plain_blocks`.

        Args:
            blocks: the blocks in order of use.
            memory: gives access to weights and pages.
            vectors: caches the vectors of specs on the card.
            lane: the stream that computes.
            working: returns a context manager in which launches go to `lane`, and errors become DeviceError.

        Raises:
            DeviceError: if weights, keys or values are not in the card's memory.
            KernelError: if weights have the wrong size or alignment.
        """
        self._memory, self._vectors, self._lane, self._working = memory, vectors, lane, working
        self._hidden = blocks[0].spec.hidden
        self._pages = min((len(block.keys) for block in blocks if block.keys is not None), default=None)
        self._steps = [self._step(block) for block in blocks]
        self._shapes = OrderedDict[Shape, _Recorded]()

    def run(self, x: F32, batch: Batch, ended: I64 | None = None) -> F32:
        """Return `x`, `[tokens, hidden]`, after all blocks and their residual connections.

        With `ended`, `[blocks]`, wait for each block, and set its end in nanoseconds since the beginning.
        """
        check_input(x, self._hidden)
        if self._pages is None:
            check_positions(batch.positions, len(x))
        else:
            check_batch(batch, self._pages)
        with self._working():
            if ended is not None:
                return self._timed(x, batch, ended)
            there = CardBatch.from_batch(batch, self._vectors.to_device)
            if there.blocks is not None or not 0 < len(x) <= _LONGEST:
                return to_host(self._all(self._vectors.to_device(x), there))
            return self._short(x, batch)

    def _all(self, x: Tensor, batch: CardBatch) -> Tensor:
        for step in self._steps:
            x = step(x, batch)
        return x

    def _timed(self, x: F32, batch: Batch, ended: I64) -> F32:
        began = clock()
        there, values = CardBatch.from_batch(batch, self._vectors.to_device), self._vectors.to_device(x)
        for number, step in enumerate(self._steps):
            values = step(values, there)
            self._lane.mark().wait()
            ended[number] = clock() - began
        return to_host(values)

    def _short(self, x: F32, batch: Batch) -> F32:
        """Compute a short step in the tensors of its shape: launch by launch the first time, later by a replay."""
        pages = power(int(batch.positions.max()) // PAGE_TOKENS + 1)
        width = max(power(batch.tables.shape[1]), pages)
        shape = (len(x), len(batch.tables), width, pages)
        held, new = self._shapes.get(shape), shape not in self._shapes
        if held is None:
            held = self._shapes[shape] = self._opened(shape)
            if len(self._shapes) > _SHAPES:
                self._shapes.popitem(last=False)
        self._shapes.move_to_end(shape)
        held.x.copy_(torch.from_numpy(np.ascontiguousarray(x)))
        held.numbers.copy_(torch.from_numpy(_numbers(batch, width)))
        if new:
            self._into(held)
        else:
            held.replay = held.replay or self._lane.record(lambda: self._into(held))
            held.replay()
        return to_host(held.out)

    def _into(self, held: _Recorded) -> None:
        held.out.copy_(self._all(held.x, held.batch))

    def _opened(self, shape: Shape) -> _Recorded:
        tokens, sequences, width, pages = shape
        x = self._vectors.to_device(np.zeros((tokens, self._hidden), np.float32))
        numbers = self._vectors.to_device(np.zeros(2 * tokens + sequences * width, np.int32))
        tables = numbers[2 * tokens :].reshape(sequences, width)
        batch = CardBatch(numbers[:tokens], numbers[tokens : 2 * tokens], tables, pages, None)
        return _Recorded(x, numbers, torch.empty_like(x), batch)

    def _step(self, block: ChainBlock) -> Step:
        compute = self._attention(block) if isinstance(block.spec, AttentionSpec) else self._feed_forward(block)
        after = self._residual(block.residual)

        def step(x: Tensor, batch: CardBatch) -> Tensor:
            normed = Activations(norm(self._vectors, block.spec.norm, x))
            return after(x, compute(normed, batch))

        return step

    def _attention(self, block: ChainBlock) -> Callable[[Activations, CardBatch], Tensor]:
        spec, vectors = block.spec, self._vectors
        assert isinstance(spec, AttentionSpec)
        assert block.keys is not None
        assert block.values is not None
        runs, pages = self._memory.runs(spec, block.data), self._memory.opened(spec, block.keys, block.values)

        def compute(normed: Activations, batch: CardBatch) -> Tensor:
            heads = project(vectors, spec, runs, normed, batch.positions)
            return output(spec, runs[0], attend(vectors, spec, heads, pages, batch))

        return compute

    def _feed_forward(self, block: ChainBlock) -> Callable[[Activations, CardBatch], Tensor]:
        spec = block.spec
        assert isinstance(spec, FfnSpec)
        weights = self._memory.weights(spec.neuron, block.data)
        return lambda normed, _: feed_forward(self._vectors, spec, weights, normed, None)

    def _residual(self, residual: Residual) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the end of a block as `tpi.kernels.arithmetic.add_residual` defines it, for tensors."""
        bias = self._vectors.of(residual).get("bias")

        def add(x: Tensor, total: Tensor) -> Tensor:
            if bias is not None:
                total = total + bias
            if residual.norm is not None:
                total = norm(self._vectors, residual.norm, total)
            total = x + total
            return total if residual.scale == 1 else total * residual.scale

        return add


def _numbers(batch: Batch, width: int) -> I32:
    """Return positions, sequence, and tables of `width` entries for each sequence, in one array."""
    tables = np.zeros((len(batch.tables), width), np.int32)
    tables[:, : batch.tables.shape[1]] = batch.tables
    return np.concatenate([batch.positions, batch.sequence, tables.reshape(-1)])

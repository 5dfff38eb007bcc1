"""A chain of blocks on an OpenCL device: hidden states stay in its memory from block to block."""

from collections.abc import Sequence
from typing import Any

from tpi.devices.checks import check_positions
from tpi.devices.opencl.card import LANES, OpenClCard
from tpi.devices.opencl.compute.activations import CardActivations
from tpi.devices.opencl.compute.speccache import SpecCache
from tpi.devices.opencl.programs import Program
from tpi.kernels.arithmetic import check_input
from tpi.kernels.spec import F32, I64, AttentionSpec, Batch, ChainBlock, FfnSpec, Residual
from tpi.trace import clock

_ELEMENTWISE = Program(("elementwise",))


class OpenClChain:
    """A chain (`tpi.kernels.Chain`) of plain attention and dense feed-forward blocks in the device's memory.

    All kernels of a step are queued without waiting. The host reads the last hidden states alone.
    """

    def __init__(self, card: OpenClCard, kept: SpecCache, blocks: Sequence[ChainBlock]) -> None:
        """Create the chain; `blocks` must satisfy `tpi.kernels.chain.plain_blocks`. `kept` has their vectors."""
        self._card, self._kept, self._blocks = card, kept, blocks
        self._biases = [None if (bias := block.residual.bias) is None else card.upload(bias) for block in blocks]

    def run(self, x: F32, batch: Batch, ended: I64 | None = None) -> F32:
        """Return `x`, `[tokens, hidden]`, after all blocks and their residual connections.

        With `ended`, `[blocks]`, wait for each block, and set its end in nanoseconds since the beginning.
        """
        began, card = clock(), self._card
        tokens = check_input(x, self._blocks[0].spec.hidden)
        check_positions(batch.positions, tokens)
        with card.working():
            hidden = card.upload(x)
            for number, (block, bias) in enumerate(zip(self._blocks, self._biases, strict=True)):
                hidden = self._after(block.residual, bias, hidden, self._partial(block, hidden, batch), tokens)
                if ended is not None:
                    card.finish()
                    ended[number] = clock() - began
            return card.download(hidden, *x.shape)

    def _partial(self, block: ChainBlock, hidden: Any, batch: Batch) -> Any:
        """Return a buffer with a block's result for the hidden states in the buffer `hidden`.

        Each method returns the buffers that it no longer needs to the pool, as `card_memory_need` counts them.
        """
        if isinstance(block.spec, FfnSpec):
            feed_forward, inner = self._kept.feed_forward(block.spec), self._inner(block, block.spec, hidden, batch)
            return feed_forward.output(block.spec, block.data, inner)
        assert isinstance(block.spec, AttentionSpec)
        assert block.keys is not None
        assert block.values is not None
        attention, step = self._kept.attention(block.spec), self._kept.step(block.spec, batch, len(block.keys))
        heads = attention.project(block.spec, block.data, self._normed(block, hidden, batch), step.positions)
        mixed = attention.attend(block.spec, heads, block.keys, block.values, step)
        return attention.output(block.spec, block.data, mixed, step.tokens)

    def _inner(self, block: ChainBlock, spec: FfnSpec, hidden: Any, batch: Batch) -> CardActivations:
        return self._kept.feed_forward(spec).inner(spec, block.data, self._normed(block, hidden, batch))

    def _normed(self, block: ChainBlock, hidden: Any, batch: Batch) -> CardActivations:
        tokens, spec = len(batch.positions), block.spec
        return CardActivations(self._card, self._kept.norm(spec.norm, hidden, tokens), tokens, spec.hidden)

    def _after(self, residual: Residual, bias: Any, hidden: Any, total: Any, tokens: int) -> Any:
        """Return the hidden states after a block, as `tpi.kernels.arithmetic.add_residual` defines them."""
        width = self._blocks[0].spec.hidden
        if residual.norm is not None:
            total = total if bias is None else self._sum(None, total, bias, 1.0, tokens, width)
            total, bias = self._kept.norm(residual.norm, total, tokens), None
        return self._sum(hidden, total, bias, float(residual.scale), tokens, width)

    def _sum(self, first: Any, second: Any, bias: Any, scale: float, tokens: int, width: int) -> Any:
        out, work = self._card.empty(tokens, width), [-(-tokens * width // LANES)]
        self._card.launch(_ELEMENTWISE, "add", work, first, second, bias, width, tokens, scale, out)
        return out

"""A chain that computes one block after the other, and the test whether an accelerator can do better."""

from collections.abc import Sequence

from tpi.kernels import Kernels
from tpi.kernels.heads import is_plain
from tpi.kernels.spec import F32, I64, AttentionSpec, Batch, ChainBlock, ExpertsSpec, FfnSpec, RecurrentSpec
from tpi.trace import clock


def plain_blocks(blocks: Sequence[ChainBlock]) -> bool:
    """Return True if an accelerator can compute all of `blocks` by itself: plain attention, dense feed-forward."""
    return all(
        (is_plain(block.spec) if isinstance(block.spec, AttentionSpec) else isinstance(block.spec, FfnSpec))
        and not (block.residual.stacked or block.residual.spread or block.residual.per_layer)
        for block in blocks
    )


class PlainChain:
    """A chain (`tpi.kernels.Chain`) that makes one call of other kernels for each block."""

    def __init__(self, kernels: Kernels, blocks: Sequence[ChainBlock]) -> None:
        self._kernels = kernels
        self._blocks = blocks

    def run(self, x: F32, batch: Batch, ended: I64 | None = None) -> F32:
        """Return `x`, `[tokens, hidden]`, after all blocks and their residual connections."""
        began = clock()
        for number, block in enumerate(self._blocks):
            x = self._kernels.add_residual(block.residual, x, self._partial(block, x, batch))
            if ended is not None:
                ended[number] = clock() - began
        return x

    def _partial(self, block: ChainBlock, x: F32, batch: Batch) -> F32:
        if isinstance(block.spec, FfnSpec):
            return self._kernels.ffn(block.spec, block.data, x)
        if isinstance(block.spec, ExpertsSpec):
            prepared = self._kernels.prepare(block.spec, x)
            return self._kernels.experts(
                block.spec, block.data, prepared, self._kernels.route(block.spec.router, prepared)
            )
        if isinstance(block.spec, RecurrentSpec):
            assert block.states is not None
            return self._kernels.recur(block.spec, block.data, x, block.states, batch)
        assert block.keys is not None  # an attention block has both caches
        assert block.values is not None
        return self._kernels.attention(block.spec, block.data, x, block.keys, block.values, batch)

"""What an OpenCL device keeps of the specs and batches it has seen: vectors, and who attends to what."""

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from tpi.devices.checks import check_batch
from tpi.devices.opencl.card import OpenClCard
from tpi.devices.opencl.compute.activations import (
    CardActivations,
    NormVectors,
    OpenClPrepared,
    form_of,
    normed,
    upload_norm,
)
from tpi.devices.opencl.compute.attention import AttentionBlock
from tpi.devices.opencl.compute.feed_forward import FeedForwardBlock
from tpi.devices.opencl.compute.tables import AttentionStep, step_of
from tpi.errors import KernelError
from tpi.kernels.arithmetic import check_input
from tpi.kernels.spec import F32, AttentionSpec, Batch, BlockSpec, FfnSpec, Input, NormSpec, Prepared
from tpi.pack.layout import RunLayout


class Kept:
    """Goes with the specs and batches themselves. Used by one thread at a time."""

    def __init__(self, card: OpenClCard) -> None:
        self._card = card
        self._norms: WeakKeyDictionary[NormSpec, NormVectors] = WeakKeyDictionary()
        self._attention: WeakKeyDictionary[AttentionSpec, AttentionBlock] = WeakKeyDictionary()
        self._feed_forward: WeakKeyDictionary[FfnSpec, FeedForwardBlock] = WeakKeyDictionary()
        self._steps: WeakKeyDictionary[Batch, dict[tuple[int, int, bytes], AttentionStep]] = WeakKeyDictionary()

    def attention(self, spec: AttentionSpec) -> AttentionBlock:
        """The block that `spec` describes."""
        if spec not in self._attention:
            self._attention[spec] = AttentionBlock(self._card, spec)
        return self._attention[spec]

    def feed_forward(self, spec: FfnSpec) -> FeedForwardBlock:
        """The block that `spec` describes."""
        if spec not in self._feed_forward:
            self._feed_forward[spec] = FeedForwardBlock(self._card, spec)
        return self._feed_forward[spec]

    def step(self, spec: AttentionSpec, batch: Batch, pages: int) -> AttentionStep:
        """Who attends to what: once for all layers of a step whose heads are alike, and that have so many pages.

        Raises:
            KernelError: if a token stands in no sequence, or in one with a page that is not there.
        """
        steps = self._steps.setdefault(batch, {})
        key = spec.heads, pages, spec.kv_index.tobytes()
        if key not in steps:
            check_batch(batch, pages)
            steps[key] = step_of(self._card, spec, batch)
        return steps[key]

    def normed(self, norm: NormSpec, x: F32) -> Any:
        """A buffer with the norm of `x`, `[tokens, hidden]`."""
        if norm not in self._norms:
            self._norms[norm] = upload_norm(self._card, norm)
        return normed(self._card, norm, self._norms[norm], x)

    def taken(self, spec: BlockSpec, x: Input) -> CardActivations:
        """A block's input on the card, normed.

        Raises:
            KernelError: if it does not fit `spec`, or others than these kernels prepared it.
        """
        if isinstance(x, np.ndarray):
            tokens = check_input(x, spec.hidden)
            return CardActivations(self._card, self.normed(spec.norm, x), tokens, spec.hidden)
        if not self._own(x):
            raise KernelError("what other kernels prepared is for their weights; prepare it again with these")
        assert isinstance(x, OpenClPrepared)
        if x.shape[1] != spec.hidden:
            raise KernelError(f"what was prepared has a hidden size of {x.shape[1]}, and the block {spec.hidden}")
        return x.activations

    def prepared(self, spec: BlockSpec, x: Input) -> OpenClPrepared:
        """See `Kernels.prepare`; what was normed, by these kernels or others, is not normed again."""
        made = self.taken(spec, x) if isinstance(x, np.ndarray) or self._own(x) else self._brought(spec, x)
        for run, name in _row_parts(spec):
            form = form_of(run, run.part(name))
            if form is not None:
                made.rounded(form)
        return OpenClPrepared(self._card, made)

    def _own(self, x: Prepared) -> bool:
        return isinstance(x, OpenClPrepared) and x.card is self._card

    def _brought(self, spec: BlockSpec, x: Prepared) -> CardActivations:
        values = x.values()
        tokens = check_input(values, spec.hidden)
        return CardActivations(self._card, self._card.upload(values), tokens, spec.hidden)


def _row_parts(spec: BlockSpec) -> list[tuple[RunLayout, str]]:
    """The parts that all of a block's input is multiplied with."""
    if isinstance(spec, AttentionSpec):
        return [(spec.query, "q"), (spec.kv, "k"), (spec.kv, "v")]
    if isinstance(spec, FfnSpec):
        return [(spec.neuron, part.name) for part in spec.neuron.parts if part.axis == "row"]
    return []  # experts are prepared for the tokens that chose them

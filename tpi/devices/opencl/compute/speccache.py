"""A cache in the card's memory: vectors of specs, and the attention tables of batches."""

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
from tpi.kernels.spec import AttentionSpec, Batch, BlockSpec, FfnSpec, Input, NormSpec, Prepared
from tpi.pack.layout import RunLayout


class SpecCache:
    """A cache of vectors and tables. Each entry lives as long as its spec or batch. Only one thread at a time may
    use it.
    """

    def __init__(self, card: OpenClCard) -> None:
        self._card = card
        self._norms: WeakKeyDictionary[NormSpec, NormVectors] = WeakKeyDictionary()
        self._attention: WeakKeyDictionary[AttentionSpec, AttentionBlock] = WeakKeyDictionary()
        self._feed_forward: WeakKeyDictionary[FfnSpec, FeedForwardBlock] = WeakKeyDictionary()
        self._steps: WeakKeyDictionary[Batch, dict[tuple[int, int, bytes], AttentionStep]] = WeakKeyDictionary()

    def attention(self, spec: AttentionSpec) -> AttentionBlock:
        """Return the attention block that `spec` describes."""
        if spec not in self._attention:
            self._attention[spec] = AttentionBlock(self._card, spec)
        return self._attention[spec]

    def feed_forward(self, spec: FfnSpec) -> FeedForwardBlock:
        """Return the feed-forward block that `spec` describes."""
        if spec not in self._feed_forward:
            self._feed_forward[spec] = FeedForwardBlock(self._card, spec)
        return self._feed_forward[spec]

    def step(self, spec: AttentionSpec, batch: Batch, pages: int) -> AttentionStep:
        """Return the tables of attention for a step, computed once for all layers with such heads and `pages` pages.

        Raises:
            KernelError: if a token has no sequence, or its sequence has a page that does not exist.
        """
        steps = self._steps.setdefault(batch, {})
        key = spec.heads, pages, spec.kv_index.tobytes()
        if key not in steps:
            check_batch(batch, pages)
            steps[key] = step_of(self._card, spec, batch)
        return steps[key]

    def norm(self, norm: NormSpec, x: Any, tokens: int) -> Any:
        """Return a buffer with the norm of `x`, a buffer of float32 `[tokens, hidden]`; `x` itself without a norm."""
        if norm.kind == "none":
            return x
        if norm not in self._norms:
            self._norms[norm] = upload_norm(self._card, norm)
        return normed(self._card, norm, self._norms[norm], x, tokens)

    def normed_input(self, spec: BlockSpec, x: Input) -> CardActivations:
        """Return a block's normalised input on the card.

        Raises:
            KernelError: if it does not fit `spec`, or other kernels prepared it.
        """
        if isinstance(x, np.ndarray):
            tokens = check_input(x, spec.hidden)
            return CardActivations(self._card, self.norm(spec.norm, self._card.upload(x), tokens), tokens, spec.hidden)
        if not self._own(x):
            raise KernelError("this input was prepared by other kernels; call prepare() of these kernels")
        assert isinstance(x, OpenClPrepared)
        if x.shape[1] != spec.hidden:
            raise KernelError(f"the prepared input has a hidden size of {x.shape[1]}, but the block has {spec.hidden}")
        return x.activations

    def prepared(self, spec: BlockSpec, x: Input) -> OpenClPrepared:
        """Return a block's normalised input on the card, rounded as the rows of `spec` need it.

        If kernels have prepared `x` already, it is not normalised again.
        """
        made = self.normed_input(spec, x) if isinstance(x, np.ndarray) or self._own(x) else self._brought(spec, x)
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
    """Return each run, with the part's name, whose rows are multiplied by a block's whole input."""
    if isinstance(spec, AttentionSpec):
        return [(spec.query, "q"), (spec.kv, "k"), (spec.kv, "v")]
    if isinstance(spec, FfnSpec):
        return [(spec.neuron, part.name) for part in spec.neuron.parts if part.axis == "row"]
    return []  # experts are prepared for the tokens that chose them

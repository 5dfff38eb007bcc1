"""`tpi.kernels.Kernels` on an OpenCL device: checks, what is kept of each spec, and activations that cross.

Calls from several threads take turns. Results are there when a call returns; what `prepare` makes stays on the card.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from tpi.devices.arena import Arena
from tpi.devices.opencl.card import LANES, Card
from tpi.devices.opencl.compute.activations import (
    Activations,
    NormVectors,
    OpenClPrepared,
    form_of,
    normed,
    upload_norm,
)
from tpi.devices.opencl.compute.attention import Attention, Heads
from tpi.devices.opencl.compute.checks import check_active, check_batch, check_cache, check_heads
from tpi.devices.opencl.compute.decode import decode
from tpi.devices.opencl.compute.feed_forward import FeedForward
from tpi.devices.opencl.compute.products import matrix_of, rows
from tpi.devices.opencl.compute.tables import Step, step_of
from tpi.devices.opencl.programs import Program
from tpi.errors import KernelError
from tpi.kernels import Chain
from tpi.kernels.arithmetic import apply_norm, biased, check_data, check_input, check_range
from tpi.kernels.chain import PlainChain
from tpi.kernels.spec import (
    F32,
    I32,
    U8,
    AttentionSpec,
    Batch,
    BlockSpec,
    ChainBlock,
    FfnSpec,
    Input,
    KvArray,
    NormSpec,
    Prepared,
    Projected,
    Residual,
)
from tpi.pack.layout import RunLayout

_READERS = 64  # work-groups a compute unit that read memory and do nothing else


class OpenClKernels:
    """The kernels in OpenCL C. See `tpi.kernels.Kernels` for what each does."""

    def __init__(self, card: Card, memory: Arena) -> None:
        """`memory` is the card's: weights, keys and values must lie in it."""
        self._card = card
        self._memory = memory
        self._norms: WeakKeyDictionary[NormSpec, NormVectors] = WeakKeyDictionary()
        self._attention: WeakKeyDictionary[AttentionSpec, Attention] = WeakKeyDictionary()
        self._feed_forward: WeakKeyDictionary[FfnSpec, FeedForward] = WeakKeyDictionary()
        self._steps: WeakKeyDictionary[Batch, dict[tuple[int, int, bytes], Step]] = WeakKeyDictionary()

    def isa(self) -> str:
        """One name for whatever the driver makes of OpenCL C."""
        return "opencl"

    def set_threads(self, count: int) -> None:
        """The device has as many as it has; `count` is ignored."""

    def threads(self) -> int:
        """The device's compute units."""
        return int(self._card.device.max_compute_units)

    def read(self, data: U8) -> None:
        """See `tpi.kernels.Kernels`."""
        self._memory.check("the data", data)
        with self._card.working():
            groups = _READERS * self.threads()
            out, words = self._card.empty(groups, LANES), np.uint64(data.size // 4)
            self._card.launch(Program(("elementwise",)), "read_bytes", [groups], *self._card.located(data), words, out)
            self._card.download(out, 1)

    def norm(self, norm: NormSpec, x: F32) -> F32:
        """See `tpi.kernels.Kernels`."""
        check_input(x, len(norm.weight))
        with self._card.working():
            return self._card.download(self._normed(norm, x), *x.shape)

    def prepare(self, spec: BlockSpec, x: Input, into: Prepared | None = None) -> OpenClPrepared:
        """See `tpi.kernels.Kernels`; memory is used again through the card's pool, when `into` is let go."""
        with self._card.working():
            made = self._taken(spec, x) if isinstance(x, np.ndarray) else self._given(spec, x)
            for run, name in _row_parts(spec):
                form = form_of(run, run.part(name))
                if form is not None:
                    made.rounded(form)
        return OpenClPrepared(self._card, made)

    def attention(self, spec: AttentionSpec, data: U8, x: Input, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """See `tpi.kernels.Kernels`."""
        self._check_attention(spec, data, keys, values, batch, x.shape[0])
        with self._card.working():
            block, step, taken = self._block(spec), self._step(spec, batch), self._taken(spec, x)
            heads = block.project(spec, data, taken, step.positions)
            mixed = block.attend(spec, heads, keys, values, step)
            return self._card.download(block.output(spec, data, mixed, step.tokens), *x.shape)

    def project(self, spec: AttentionSpec, data: U8, x: Input, positions: I32) -> Projected:
        """See `tpi.kernels.Kernels`."""
        self._check_weights(spec, data)
        check_heads("positions", positions, np.int32, (x.shape[0],))
        with self._card.working():
            card, tokens = self._card, x.shape[0]
            heads = self._block(spec).project(spec, data, self._taken(spec, x), card.upload(positions))
            kv_shape = (tokens, spec.kv_heads, spec.head_dim)
            queries = card.download(heads.queries, tokens, spec.heads, spec.head_dim)
            return Projected(queries, card.download(heads.keys, *kv_shape), card.download(heads.values, *kv_shape))

    def attend(self, spec: AttentionSpec, projected: Projected, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """See `tpi.kernels.Kernels`."""
        self._check_caches(spec, keys, values, batch)
        tokens, width = len(batch.positions), spec.heads * spec.head_dim
        check_heads("queries", projected.queries, np.float32, (tokens, spec.heads, spec.head_dim))
        for name, heads in (("keys", projected.keys), ("values", projected.values)):
            check_heads(name, heads, np.float32, (tokens, spec.kv_heads, spec.head_dim))
        with self._card.working():
            given = Heads(*map(self._card.upload, (projected.queries, projected.keys, projected.values)))
            mixed = self._block(spec).attend(spec, given, keys, values, self._step(spec, batch))
            padded = self._card.download(mixed, tokens, spec.query.units * spec.query.width)
        return np.ascontiguousarray(padded[:, :width])

    def output(self, spec: AttentionSpec, data: U8, mixed: F32) -> F32:
        """See `tpi.kernels.Kernels`."""
        self._check_weights(spec, data)
        width = spec.heads * spec.head_dim
        tokens = check_input(mixed, width)
        padded = np.zeros((tokens, spec.query.units * spec.query.width), np.float32)
        padded[:, :width] = mixed
        with self._card.working():
            out = self._block(spec).output(spec, data, self._card.upload(padded), tokens)
            return self._card.download(out, tokens, spec.hidden)

    def ffn(self, spec: FfnSpec, data: U8, x: Input, active: I32 | None = None) -> F32:
        """See `tpi.kernels.Kernels`."""
        self._memory.check("weights", data)
        check_data(data, spec.neuron.units * spec.neuron.unit_bytes)
        check_active(spec.neuron, active)
        with self._card.working():
            if spec not in self._feed_forward:
                self._feed_forward[spec] = FeedForward(self._card, spec)
            out = self._feed_forward[spec].run(spec, data, self._taken(spec, x), active)
            return self._card.download(out, *x.shape)

    def add_residual(self, residual: Residual, x: F32, total: F32) -> F32:
        """See `tpi.kernels.Kernels`; on the host, where both are."""
        total = biased(total, residual.bias)
        return x + (total if residual.norm is None else apply_norm(residual.norm, total))

    def open_chain(self, blocks: Sequence[ChainBlock]) -> Chain:
        """See `tpi.kernels.Kernels`; one block after the other."""
        for block in blocks:
            self._memory.check("weights", block.data)
        return PlainChain(self, blocks)

    def logits(self, run: RunLayout, data: U8, x: F32) -> F32:
        """See `tpi.kernels.Kernels`."""
        self._check_run(run, data)
        tokens = check_input(x, run.hidden)
        with self._card.working():
            given = Activations(self._card, self._card.upload(x), tokens, run.hidden)
            matrix = matrix_of(self._card, run, run.parts[0].name, data)
            return self._card.download(rows(self._card, matrix, given), tokens, matrix.vectors)

    def gather(self, run: RunLayout, data: U8, rows: I32) -> F32:
        """See `tpi.kernels.Kernels`."""
        self._check_run(run, data)
        check_range("row", rows, run.units * run.width)
        with self._card.working():
            return decode(self._card, matrix_of(self._card, run, run.parts[0].name, data), rows)

    def dequantise(self, run: RunLayout, data: U8, part: str) -> F32:
        """See `tpi.kernels.Kernels`."""
        self._check_run(run, data)
        with self._card.working():
            return decode(self._card, matrix_of(self._card, run, part, data))

    def _taken(self, spec: BlockSpec, x: Input) -> Activations:
        """The block's input on the card, normed."""
        if isinstance(x, np.ndarray):
            tokens = check_input(x, spec.hidden)
            return Activations(self._card, self._normed(spec.norm, x), tokens, spec.hidden)
        if not isinstance(x, OpenClPrepared) or x.card is not self._card:
            raise KernelError("what other kernels prepared is for their weights; prepare it again with these")
        if x.shape[1] != spec.hidden:
            raise KernelError(f"what was prepared has a hidden size of {x.shape[1]}, and the block {spec.hidden}")
        return x.activations

    def _given(self, spec: BlockSpec, x: Prepared) -> Activations:
        """What was normed before, by these kernels or by others."""
        if isinstance(x, OpenClPrepared) and x.card is self._card:
            return self._taken(spec, x)
        values = x.values()
        tokens = check_input(values, spec.hidden)
        return Activations(self._card, self._card.upload(values), tokens, spec.hidden)

    def _normed(self, norm: NormSpec, x: F32) -> Any:
        if norm not in self._norms:
            self._norms[norm] = upload_norm(self._card, norm)
        return normed(self._card, norm, self._norms[norm], x)

    def _block(self, spec: AttentionSpec) -> Attention:
        if spec not in self._attention:
            self._attention[spec] = Attention(self._card, spec)
        return self._attention[spec]

    def _step(self, spec: AttentionSpec, batch: Batch) -> Step:
        """What a step's layers share, which is all of it where their heads are alike."""
        steps = self._steps.setdefault(batch, {})
        heads = spec.heads, spec.kv_heads, spec.kv_index.tobytes()
        if heads not in steps:
            steps[heads] = step_of(self._card, spec, batch)
        return steps[heads]

    def _check_attention(
        self, spec: AttentionSpec, data: U8, keys: KvArray, values: KvArray, batch: Batch, tokens: int
    ) -> None:
        self._check_weights(spec, data)
        self._check_caches(spec, keys, values, batch)
        check_heads("positions", batch.positions, np.int32, (tokens,))

    def _check_caches(self, spec: AttentionSpec, keys: KvArray, values: KvArray, batch: Batch) -> None:
        for cache in (keys, values):
            self._memory.check("the caches", cache)
            check_cache(spec, cache)
        check_batch(batch, len(keys))

    def _check_weights(self, spec: AttentionSpec, data: U8) -> None:
        self._memory.check("weights", data)
        check_data(data, spec.query.units * spec.query.unit_bytes + spec.kv.units * spec.kv.unit_bytes)

    def _check_run(self, run: RunLayout, data: U8) -> None:
        self._memory.check("weights", data)
        check_data(data, run.units * run.unit_bytes)


def _row_parts(spec: BlockSpec) -> list[tuple[RunLayout, str]]:
    """The parts that a block's input is multiplied with."""
    if isinstance(spec, FfnSpec):
        return [(spec.neuron, part.name) for part in spec.neuron.parts if part.axis == "row"]
    return [(spec.query, "q"), (spec.kv, "k"), (spec.kv, "v")]

"""`tpi.kernels.Kernels` on an OpenCL device: checks, cached vectors of specs, and transfers of activations.

Calls from several threads take turns. A call returns when its result is in host memory; what `prepare` returns stays on
the card.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tpi.devices.arena import Arena
from tpi.devices.checks import check_active, check_caches, check_heads, check_positions, check_rows
from tpi.devices.opencl.card import LANES, OpenClCard
from tpi.devices.opencl.compute.activations import CardActivations, OpenClPrepared
from tpi.devices.opencl.compute.attention import HeadBuffers
from tpi.devices.opencl.compute.chain import OpenClChain
from tpi.devices.opencl.compute.products import PackedPart, matrix_of, rows
from tpi.devices.opencl.compute.speccache import SpecCache
from tpi.devices.opencl.programs import Program
from tpi.kernels import Chain
from tpi.kernels.arithmetic import add_residual, check_data, check_input
from tpi.kernels.chain import PlainChain, plain_blocks
from tpi.kernels.heads import attention_in_steps, is_plain, projected_on_host
from tpi.kernels.mixture import choose, experts_by_ffn, normed_on_host, pieces_by_ffn
from tpi.kernels.recurrent.states import refused
from tpi.kernels.spec import (
    F32,
    I32,
    U8,
    AttentionSpec,
    Batch,
    BlockSpec,
    ChainBlock,
    ExpertsSpec,
    FfnSpec,
    Input,
    KvArray,
    NormSpec,
    Prepared,
    Projected,
    RecurrentSpec,
    Residual,
    RouterSpec,
    Routing,
)
from tpi.pack.layout import RunLayout

_READERS = 64  # work-groups per compute unit that `read` starts


def decode(card: OpenClCard, matrix: PackedPart, listed: I32 | None = None) -> F32:
    """Return the vectors of a part whose numbers are in `listed` (None: all), float32 `[vectors, hidden]`."""
    run, program = matrix.run, Program(("formats", "decode"), (matrix.defined,))
    count = matrix.vectors if listed is None else len(listed)
    which: Any = None if listed is None else card.upload(listed)
    out, work = card.empty(count, run.hidden), [count]
    if run.layout == "record":
        where: tuple[Any, ...] = (np.uint64(run.record_bytes), run.hidden)
        card.launch(program, "decode_records", work, matrix.buffer, matrix.offset, *where, which, out)
    else:
        where = (np.uint64(run.unit_bytes), run.width, matrix.part.axis == "column", run.hidden)
        card.launch(program, "decode_tiles", work, matrix.buffer, matrix.offset, *where, which, out)
    return card.download(out, count, run.hidden)


class OpenClKernels:
    """The operations of `tpi.kernels.Kernels`, implemented in OpenCL C."""

    plain_models = True  # see `tpi.devices.abilities`

    def __init__(self, card: OpenClCard, memory: Arena) -> None:
        """Create the kernels of `card`; weights, keys and values must lie in `memory`, the card's arena."""
        self._card = card
        self._memory = memory
        self._kept = SpecCache(card)

    def isa(self) -> str:
        """Return "opencl", whatever the driver compiles OpenCL C to."""
        return "opencl"

    def set_threads(self, count: int) -> None:
        """Do nothing, because the device chooses its own number of threads."""

    def threads(self) -> int:
        """Return the number of the device's compute units."""
        return int(self._card.device.max_compute_units)

    def read(self, data: U8) -> None:
        """Read the 1-D bytes `data` with all threads and compute nothing, to measure the memory's bandwidth."""
        self._memory.check("the data", data)
        with self._card.working():
            groups = _READERS * self.threads()
            out, words = self._card.empty(groups, LANES), np.uint64(data.size // 4)
            self._card.launch(Program(("elementwise",)), "read_bytes", [groups], *self._card.located(data), words, out)
            self._card.download(out, 1)

    def norm(self, norm: NormSpec, x: F32) -> F32:
        """Return the norm of the hidden states `x`, float32 `[tokens, hidden]`."""
        check_input(x, len(norm.weight))
        with self._card.working():
            return self._card.download(self._kept.norm(norm, self._card.upload(x), len(x)), *x.shape)

    def prepare(self, spec: BlockSpec, x: Input, into: Prepared | None = None) -> OpenClPrepared:
        """Return the norm of the input `x` on this device, in the form that the block's segments use.

        `into` is not needed, since the card's pool reuses memory.
        """
        with self._card.working():
            return self._kept.prepared(spec, x)

    def attention(self, spec: AttentionSpec, data: U8, x: Input, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """Return a segment's partial sum of an attention block, float32 `[tokens, hidden]`."""
        if not is_plain(spec):
            return attention_in_steps(self, spec, data, x, keys, values, batch)
        self._check_weights(spec, data)
        self._check_caches(spec, keys, values)
        check_positions(batch.positions, x.shape[0])
        with self._card.working():
            block, step = self._kept.attention(spec), self._kept.step(spec, batch, len(keys))
            heads = block.project(spec, data, self._kept.normed_input(spec, x), step.positions)
            mixed = block.attend(spec, heads, keys, values, step)
            return self._card.download(block.output(spec, data, mixed, step.tokens), *x.shape)

    def project(self, spec: AttentionSpec, data: U8, x: Input, positions: I32) -> Projected:
        """Return the queries, keys and values of the tokens at `positions`."""
        if not is_plain(spec):
            return projected_on_host(self, spec, data, x, positions)
        self._check_weights(spec, data)
        check_positions(positions, x.shape[0])
        with self._card.working():
            card, tokens = self._card, x.shape[0]
            heads = self._kept.attention(spec).project(
                spec, data, self._kept.normed_input(spec, x), card.upload(positions)
            )
            kv_shape = (tokens, spec.kv_heads, spec.head_dim)
            queries = card.download(heads.queries, tokens, spec.heads, spec.head_dim)
            return Projected(queries, card.download(heads.keys, *kv_shape), card.download(heads.values, *kv_shape))

    def attend(self, spec: AttentionSpec, projected: Projected, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """Append keys and values to the cache, then return the attention of all heads, `[tokens, heads * head_dim]`."""
        self._check_caches(spec, keys, values)
        tokens, width = len(batch.positions), spec.heads * spec.head_dim
        check_heads(spec, projected, tokens)
        with self._card.working():
            given = HeadBuffers(*map(self._card.upload, (projected.queries, projected.keys, projected.values)))
            step = self._kept.step(spec, batch, len(keys))
            mixed = self._kept.attention(spec).attend(spec, given, keys, values, step)
            padded = self._card.download(mixed, tokens, spec.query.units * spec.query.width)
        return np.ascontiguousarray(padded[:, :width])

    def output(self, spec: AttentionSpec, data: U8, mixed: F32) -> F32:
        """Return the output projection of `mixed`, the result of `attend`: float32 `[tokens, hidden]`."""
        self._check_weights(spec, data)
        width = spec.heads * spec.head_dim
        tokens = check_input(mixed, width)
        padded = np.zeros((tokens, spec.query.units * spec.query.width), np.float32)
        padded[:, :width] = mixed
        with self._card.working():
            out = self._kept.attention(spec).output(spec, data, self._card.upload(padded), tokens)
            return self._card.download(out, tokens, spec.hidden)

    def recur(self, spec: RecurrentSpec, data: U8, x: Input, states: F32, batch: Batch) -> F32:
        """Raise KernelError: no accelerator computes recurrent blocks."""
        raise refused("OpenCL")

    def ffn(self, spec: FfnSpec, data: U8, x: Input, active: I32 | None = None) -> F32:
        """Return a segment's partial sum of a feed-forward block, float32 `[tokens, hidden]`."""
        self._check_neurons(spec, data)
        check_active(spec.neuron, active)
        with self._card.working():
            out = self._kept.feed_forward(spec).run(spec, data, self._kept.normed_input(spec, x), active)
            return self._card.download(out, *x.shape)

    def route(self, router: RouterSpec, x: Input) -> Routing:
        """Return the experts that each token chooses, with their weights. The host computes it."""
        return choose(router, normed_on_host(router.norm, x))

    def experts(self, spec: ExpertsSpec, data: U8, x: Input, routing: Routing) -> F32:
        """Return a segment's partial sum of a block of experts, `[tokens, hidden]`, computed expert by expert."""
        return experts_by_ffn(self, spec, data, normed_on_host(spec.norm, x), routing)

    def expert_pieces(self, spec: ExpertsSpec, data: Mapping[int, U8], x: Input, routing: Routing) -> F32:
        """Return the sum of the outputs of the expert pieces in `data`, `[tokens, hidden]`, computed one by one."""
        return pieces_by_ffn(self, spec, data, normed_on_host(spec.norm, x), routing)

    def add_residual(self, residual: Residual, x: F32, total: F32) -> F32:
        """Return `x` plus the sum over all nodes, `total`. The host computes it, because it has both arrays."""
        return add_residual(residual, x, total)

    def open_chain(self, blocks: Sequence[ChainBlock]) -> Chain:
        """Return a chain that runs `blocks` in order; hidden states stay on the device if it can compute all blocks."""
        if not plain_blocks(blocks):
            for block in blocks:
                self._memory.check("weights", block.data)
            return PlainChain(self, blocks)
        for block in blocks:
            self._check_block(block)
        with self._card.working():
            return OpenClChain(self._card, self._kept, blocks)

    def logits(self, run: RunLayout, data: U8, x: F32) -> F32:
        """Return the products of `x` with each row of a table, float32 `[tokens, units * width]`."""
        self._check_run(run, data)
        tokens = check_input(x, run.hidden)
        with self._card.working():
            given = CardActivations(self._card, self._card.upload(x), tokens, run.hidden)
            matrix = matrix_of(self._card, run, run.parts[0].name, data)
            return self._card.download(rows(self._card, matrix, given), tokens, matrix.vectors)

    def gather(self, run: RunLayout, data: U8, rows: I32) -> F32:
        """Return the rows of a table that `rows` lists by number, float32 `[len(rows), hidden]`."""
        self._check_run(run, data)
        check_rows(run, rows)
        with self._card.working():
            return decode(self._card, matrix_of(self._card, run, run.parts[0].name, data), rows)

    def dequantise(self, run: RunLayout, data: U8, part: str) -> F32:
        """Return the part of a run called `part`, dequantised to float32 `[units * width, hidden]`."""
        self._check_run(run, data)
        with self._card.working():
            return decode(self._card, matrix_of(self._card, run, part, data))

    def _check_block(self, block: ChainBlock) -> None:
        if isinstance(block.spec, FfnSpec):
            self._check_neurons(block.spec, block.data)
            return
        assert isinstance(block.spec, AttentionSpec)
        assert block.keys is not None
        assert block.values is not None
        self._check_weights(block.spec, block.data)
        self._check_caches(block.spec, block.keys, block.values)

    def _check_caches(self, spec: AttentionSpec, keys: KvArray, values: KvArray) -> None:
        for cache in (keys, values):
            self._memory.check("the caches", cache)
        check_caches(spec, keys, values)

    def _check_weights(self, spec: AttentionSpec, data: U8) -> None:
        self._memory.check("weights", data)
        check_data(data, spec.query.units * spec.query.unit_bytes + spec.kv.units * spec.kv.unit_bytes)

    def _check_neurons(self, spec: FfnSpec, data: U8) -> None:
        self._memory.check("weights", data)
        check_data(data, spec.neuron.units * spec.neuron.unit_bytes)

    def _check_run(self, run: RunLayout, data: U8) -> None:
        self._memory.check("weights", data)
        check_data(data, run.units * run.unit_bytes)

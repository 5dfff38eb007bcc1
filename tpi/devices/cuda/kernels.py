"""The kernels of a card as `tpi.kernels.Kernels`.

Each call checks its arguments, copies them to the card, launches, and copies its result back. Weights, keys and values
are named by arrays of the device's arena; all other arrays are in host memory. Several threads may call; all calls are
computed in one lane, in order.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from tpi.devices.arena import Arena
from tpi.devices.checks import check_active, check_array, check_heads, check_positions, check_rows
from tpi.devices.cuda.activations import Activations, CudaPrepared, to_host
from tpi.devices.cuda.attention import CardBatch
from tpi.devices.cuda.backend import Tensor, TorchBackend
from tpi.devices.cuda.blocks import SpecVectors, attend, feed_forward, norm, output, project
from tpi.devices.cuda.chain import CudaChain
from tpi.devices.cuda.matrix import matrix
from tpi.devices.cuda.memory import CardMemory
from tpi.devices.cuda.products import decode, multiply
from tpi.devices.cuda.tensors import TensorTable
from tpi.devices.failures import close_all, explained
from tpi.errors import KernelError
from tpi.kernels import Chain
from tpi.kernels.arithmetic import add_residual, check_input
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


class CudaKernels:
    """The operations of `tpi.kernels.Kernels`, implemented in Triton."""

    plain_models = True  # see `tpi.devices.abilities`

    def __init__(self, backend: TorchBackend, memory: Arena, names: TensorTable) -> None:
        """Create the kernels of a card.

        Weights, keys and values must lie in `memory`, and `names` maps arrays to tensors.
        """
        self._name = backend.name
        self._lane = backend.lane()
        self._memory = CardMemory(memory, names)
        self._vectors = SpecVectors(backend.device)

    def close(self) -> None:
        """Wait for all launches, then release the cached vectors of specs."""
        close_all(lambda: self._lane.mark().wait(), self._vectors.clear)

    def isa(self) -> str:
        """Return "cuda"."""
        return "cuda"

    def set_threads(self, count: int) -> None:
        """Do nothing, because the card has its own threads."""

    def threads(self) -> int:
        """Return 1: only one host thread takes part, the one that launches kernels."""
        return 1

    def read(self, data: U8) -> None:
        """Read the 1-D bytes `data` with all threads and compute nothing, to measure the memory's bandwidth."""
        with self._working():
            words = self._memory.bytes("the data", data)[: data.size // 8 * 8]
            if len(words):
                words.view(torch.int64).amax().item()

    def norm(self, spec: NormSpec, x: F32) -> F32:
        """Return the norm of the hidden states `x`, float32 `[tokens, hidden]`."""
        check_input(x, len(spec.weight))
        with self._working():
            return to_host(norm(self._vectors, spec, self._vectors.to_device(x)))

    def prepare(self, spec: BlockSpec, x: Input, into: Prepared | None = None) -> CudaPrepared:
        """Return the norm of the input `x` on this device, in the form that the block's segments use.

        `into` is not needed, since torch's allocator reuses memory.
        """
        with self._working():
            return CudaPrepared(self._prepared(spec, x), self._bring_back)

    def attention(self, spec: AttentionSpec, data: U8, x: Input, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """Return a segment's partial sum of an attention block, float32 `[tokens, hidden]`."""
        if not is_plain(spec):
            return attention_in_steps(self, spec, data, x, keys, values, batch)
        with self._working():
            runs, there = self._memory.runs(spec, data), CardBatch.from_batch(batch, self._vectors.to_device)
            pages = self._memory.pages(spec, keys, values, batch)
            heads = project(self._vectors, spec, runs, self._input(spec, x), there.positions)
            return to_host(output(spec, runs[0], attend(self._vectors, spec, heads, pages, there)))

    def project(self, spec: AttentionSpec, data: U8, x: Input, positions: I32) -> Projected:
        """Return the queries, keys and values of the tokens at `positions`."""
        if not is_plain(spec):
            return projected_on_host(self, spec, data, x, positions)
        check_positions(positions, x.shape[0])
        with self._working():
            places, runs = self._vectors.to_device(positions), self._memory.runs(spec, data)
            heads = project(self._vectors, spec, runs, self._input(spec, x), places)
            return Projected(*map(to_host, heads))

    def attend(self, spec: AttentionSpec, projected: Projected, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """Append keys and values to the cache, then return the attention of all heads, `[tokens, heads * head_dim]`."""
        check_heads(spec, projected, len(batch.positions))
        to_device = self._vectors.to_device
        with self._working():
            pages = self._memory.pages(spec, keys, values, batch)
            heads = to_device(projected.queries), to_device(projected.keys), to_device(projected.values)
            return to_host(attend(self._vectors, spec, heads, pages, CardBatch.from_batch(batch, to_device)))

    def output(self, spec: AttentionSpec, data: U8, mixed: F32) -> F32:
        """Return the output projection of `mixed`, the result of `attend`: float32 `[tokens, hidden]`."""
        check_array("heads", mixed, np.float32, (len(mixed), spec.heads * spec.head_dim))
        with self._working():
            return to_host(output(spec, self._memory.runs(spec, data)[0], self._vectors.to_device(mixed)))

    def recur(self, spec: RecurrentSpec, data: U8, x: Input, states: F32, batch: Batch) -> F32:
        """Raise KernelError: no accelerator computes recurrent blocks."""
        raise refused("CUDA")

    def ffn(self, spec: FfnSpec, data: U8, x: Input, active: I32 | None = None) -> F32:
        """Return a segment's partial sum of a feed-forward block, float32 `[tokens, hidden]`."""
        check_active(spec.neuron, active)
        with self._working():
            index = None if active is None else self._vectors.to_device(active)
            weights, prepared = self._memory.weights(spec.neuron, data), self._input(spec, x)
            return to_host(feed_forward(self._vectors, spec, weights, prepared, index))

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
        """Return a chain that runs `blocks` in order; hidden states stay on the card if it can compute all blocks."""
        if not plain_blocks(blocks):
            return PlainChain(self, blocks)
        with self._working():
            return CudaChain(blocks, self._memory, self._vectors, self._lane, self._working)

    def logits(self, run: RunLayout, data: U8, x: F32) -> F32:
        """Return the products of `x` with each row of a table, float32 `[tokens, units * width]`."""
        check_input(x, run.hidden)
        with self._working():
            table = matrix(run, run.parts[0].name)
            return to_host(multiply(self._memory.weights(run, data), table, Activations(self._vectors.to_device(x))))

    def gather(self, run: RunLayout, data: U8, rows: I32) -> F32:
        """Return the rows of a table that `rows` lists by number, float32 `[len(rows), hidden]`."""
        check_rows(run, rows)
        with self._working():
            table = matrix(run, run.parts[0].name)
            return to_host(decode(self._memory.weights(run, data), table, self._vectors.to_device(rows)))

    def dequantise(self, run: RunLayout, data: U8, part: str) -> F32:
        """Return the part of a run called `part`, dequantised to float32 `[units * width, hidden]`."""
        with self._working():
            return to_host(decode(self._memory.weights(run, data), matrix(run, part)))

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Use the stream of these kernels within the block; raise errors of the card or a compiler as DeviceError."""
        with (
            explained(f"{self._name} failed", "give a smaller --gpu-memory, or choose another device"),
            self._lane.use(),
        ):
            yield

    def _bring_back(self, values: Tensor) -> F32:
        with self._working():
            return to_host(values)

    def _prepared(self, spec: BlockSpec, x: Input) -> Activations:
        """Return the normalised input on the card; copy it to the card if other kernels prepared it."""
        if isinstance(x, CudaPrepared) and x.bring_back == self._bring_back:
            return x.input
        if isinstance(x, np.ndarray):
            check_input(x, spec.hidden)
            return Activations(norm(self._vectors, spec.norm, self._vectors.to_device(x)))
        values = x.values()
        check_input(values, spec.hidden)
        return Activations(self._vectors.to_device(values))

    def _input(self, spec: BlockSpec, x: Input) -> Activations:
        """Return the normalised input on the card.

        Raises:
            KernelError: if other kernels prepared the input, or its hidden size differs from that of `spec`.
        """
        if not isinstance(x, np.ndarray):
            if not (isinstance(x, CudaPrepared) and x.bring_back == self._bring_back):
                raise KernelError("this input was prepared by other kernels; call prepare() of these kernels")
            if x.shape[1] != spec.hidden:
                raise KernelError(
                    f"the prepared input has a hidden size of {x.shape[1]}, but the block has {spec.hidden}"
                )
        return self._prepared(spec, x)

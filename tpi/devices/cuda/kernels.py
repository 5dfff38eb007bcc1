"""The kernels of a card as `tpi.kernels.Kernels`: checks what comes, brings it there, launches, brings back results.

Weights, keys and values are named by arrays of the device's arena; all else is the host's. Calls may come from several
threads; all are computed in one lane, in the order in which they come.
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
from tpi.devices.cuda.matrix import matrix
from tpi.devices.cuda.memory import CardMemory
from tpi.devices.cuda.products import decode, multiply
from tpi.devices.cuda.tensors import TensorNames
from tpi.devices.failures import close_all, explained
from tpi.errors import KernelError
from tpi.kernels.arithmetic import apply_norm, biased, check_input
from tpi.kernels.chain import PlainChain
from tpi.kernels.heads import attention_in_steps, is_plain, projected_on_host
from tpi.kernels.mixture import choose, experts_by_ffn, normed_on_host, pieces_by_ffn
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
    Residual,
    RouterSpec,
    Routing,
)
from tpi.pack.layout import RunLayout


class CudaKernels:
    """The kernels in Triton. See `tpi.kernels.Kernels` for what each does, and raises."""

    plain_models = True  # see `tpi.devices.abilities`

    def __init__(self, backend: TorchBackend, memory: Arena, names: TensorNames) -> None:
        """`memory` and `names` say which arrays are here, and what they are."""
        self._name = backend.name
        self._lane = backend.lane()
        self._memory = CardMemory(memory, names)
        self._vectors = SpecVectors(backend.device)

    def close(self) -> None:
        """Let go of what was kept of specs, when all that was launched has ended."""
        close_all(lambda: self._lane.mark().wait(), self._vectors.clear)

    def isa(self) -> str:
        """See `tpi.kernels.Kernels`."""
        return "cuda"

    def set_threads(self, count: int) -> None:
        """A card has its own threads; `count` is ignored."""

    def threads(self) -> int:
        """One: the host's, which launches."""
        return 1

    def read(self, data: U8) -> None:
        """See `tpi.kernels.Kernels`."""
        with self._working():
            words = self._memory.bytes("the data", data)[: data.size // 8 * 8]
            if len(words):
                words.view(torch.int64).amax().item()

    def norm(self, spec: NormSpec, x: F32) -> F32:
        """See `tpi.kernels.Kernels`."""
        check_input(x, len(spec.weight))
        with self._working():
            return to_host(norm(self._vectors, spec, self._vectors.bring(x)))

    def prepare(self, spec: BlockSpec, x: Input, into: Prepared | None = None) -> CudaPrepared:
        """See `tpi.kernels.Kernels`; torch's allocator gives the memory of what is gone again, `into` is not needed."""
        with self._working():
            return CudaPrepared(self._prepared(spec, x), self._bring_back)

    def attention(self, spec: AttentionSpec, data: U8, x: Input, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """See `tpi.kernels.Kernels`."""
        if not is_plain(spec):
            return attention_in_steps(self, spec, data, x, keys, values, batch)
        with self._working():
            runs, there = self._memory.runs(spec, data), CardBatch.bring(batch, self._vectors.bring)
            pages = self._memory.pages(spec, keys, values, batch)
            heads = project(self._vectors, spec, runs, self._input(spec, x), there.positions)
            return to_host(output(spec, runs[0], attend(self._vectors, spec, heads, pages, there)))

    def project(self, spec: AttentionSpec, data: U8, x: Input, positions: I32) -> Projected:
        """See `tpi.kernels.Kernels`."""
        if not is_plain(spec):
            return projected_on_host(self, spec, data, x, positions)
        check_positions(positions, x.shape[0])
        with self._working():
            places, runs = self._vectors.bring(positions), self._memory.runs(spec, data)
            heads = project(self._vectors, spec, runs, self._input(spec, x), places)
            return Projected(*map(to_host, heads))

    def attend(self, spec: AttentionSpec, projected: Projected, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """See `tpi.kernels.Kernels`."""
        check_heads(spec, projected, len(batch.positions))
        bring = self._vectors.bring
        with self._working():
            pages = self._memory.pages(spec, keys, values, batch)
            heads = bring(projected.queries), bring(projected.keys), bring(projected.values)
            return to_host(attend(self._vectors, spec, heads, pages, CardBatch.bring(batch, bring)))

    def output(self, spec: AttentionSpec, data: U8, mixed: F32) -> F32:
        """See `tpi.kernels.Kernels`."""
        check_array("heads", mixed, np.float32, (len(mixed), spec.heads * spec.head_dim))
        with self._working():
            return to_host(output(spec, self._memory.runs(spec, data)[0], self._vectors.bring(mixed)))

    def ffn(self, spec: FfnSpec, data: U8, x: Input, active: I32 | None = None) -> F32:
        """See `tpi.kernels.Kernels`."""
        check_active(spec.neuron, active)
        with self._working():
            index = None if active is None else self._vectors.bring(active)
            weights, prepared = self._memory.weights(spec.neuron, data), self._input(spec, x)
            return to_host(feed_forward(self._vectors, spec, weights, prepared, index))

    def route(self, router: RouterSpec, x: Input) -> Routing:
        """See `tpi.kernels.Kernels`; on the host."""
        return choose(router, normed_on_host(router.norm, x))

    def experts(self, spec: ExpertsSpec, data: U8, x: Input, routing: Routing) -> F32:
        """See `tpi.kernels.Kernels`; one expert after the other."""
        return experts_by_ffn(self, spec, data, normed_on_host(spec.norm, x), routing)

    def expert_pieces(self, spec: ExpertsSpec, data: Mapping[int, U8], x: Input, routing: Routing) -> F32:
        """See `tpi.kernels.Kernels`; one expert after the other."""
        return pieces_by_ffn(self, spec, data, normed_on_host(spec.norm, x), routing)

    def add_residual(self, residual: Residual, x: F32, total: F32) -> F32:
        """See `tpi.kernels.Kernels`; by the host, where both are."""
        total = biased(total, residual.bias)
        return x + (total if residual.norm is None else apply_norm(residual.norm, total))

    def open_chain(self, blocks: Sequence[ChainBlock]) -> PlainChain:
        """See `tpi.kernels.Kernels`."""
        return PlainChain(self, blocks)

    def logits(self, run: RunLayout, data: U8, x: F32) -> F32:
        """See `tpi.kernels.Kernels`."""
        check_input(x, run.hidden)
        with self._working():
            table = matrix(run, run.parts[0].name)
            return to_host(multiply(self._memory.weights(run, data), table, Activations(self._vectors.bring(x))))

    def gather(self, run: RunLayout, data: U8, rows: I32) -> F32:
        """See `tpi.kernels.Kernels`."""
        check_rows(run, rows)
        with self._working():
            table = matrix(run, run.parts[0].name)
            return to_host(decode(self._memory.weights(run, data), table, self._vectors.bring(rows)))

    def dequantise(self, run: RunLayout, data: U8, part: str) -> F32:
        """See `tpi.kernels.Kernels`."""
        with self._working():
            return to_host(decode(self._memory.weights(run, data), matrix(run, part)))

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Work in the lane of these kernels; whatever the card or a compiler refuses is a DeviceError."""
        with explained(f"{self._name} failed", "give it less to hold, or choose another device"), self._lane.use():
            yield

    def _bring_back(self, values: Tensor) -> F32:
        with self._working():
            return to_host(values)

    def _prepared(self, spec: BlockSpec, x: Input) -> Activations:
        """The normed input; what was normed elsewhere only comes here."""
        if isinstance(x, CudaPrepared) and x.bring_back == self._bring_back:
            return x.input
        if isinstance(x, np.ndarray):
            check_input(x, spec.hidden)
            return Activations(norm(self._vectors, spec.norm, self._vectors.bring(x)))
        values = x.values()
        check_input(values, spec.hidden)
        return Activations(self._vectors.bring(values))

    def _input(self, spec: BlockSpec, x: Input) -> Activations:
        """The normed input; KernelError if other kernels prepared it, or for another hidden size."""
        if not isinstance(x, np.ndarray):
            if not (isinstance(x, CudaPrepared) and x.bring_back == self._bring_back):
                raise KernelError("what other kernels prepared is for their weights; prepare it again with these")
            if x.shape[1] != spec.hidden:
                raise KernelError(f"what was prepared has the hidden size {x.shape[1]}, not {spec.hidden}")
        return self._prepared(spec, x)

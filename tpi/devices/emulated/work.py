"""The work of a kernel, in bytes and operations, from the shapes of its arguments.

A product of `tokens` inputs with a matrix takes two operations per weight and token, and reads each weight once. Norms
and sums are counted by their bytes alone. The cache is read once for each sequence of a step.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from tpi.kernels.recurrent.states import refused
from tpi.kernels.spec import (
    I32,
    SHARED,
    AttentionSpec,
    Batch,
    ChainBlock,
    ExpertsSpec,
    FfnSpec,
    KvArray,
    RecurrentSpec,
    RouterSpec,
    Routing,
)
from tpi.pack.layout import RunLayout

_F32 = 4  # bytes


@dataclass(frozen=True)
class KernelWork:
    """The work of one kernel call.

    Attributes:
        nbytes: bytes read from and written to the memory of the device.
        operations: number of additions and multiplications.
        up, down: bytes of activations that are transferred from the host's memory, and to it.
    """

    nbytes: float = 0.0
    operations: float = 0.0
    up: int = 0
    down: int = 0

    def __add__(self, other: "KernelWork") -> "KernelWork":
        return KernelWork(
            self.nbytes + other.nbytes,
            self.operations + other.operations,
            self.up + other.up,
            self.down + other.down,
        )


@dataclass(frozen=True)
class Roofline:
    """A device's speed as a roofline model (Williams et al., 2009), plus launch and transfers.

    Attributes:
        memory: bytes per second of its memory.
        operations: operations per second.
        launch: seconds before a kernel begins.
        up, down: bytes per second of activations from the host's memory and to it.
        latency: seconds before the first byte of each transfer.
    """

    memory: float
    operations: float
    launch: float = 0.0
    up: float = float("inf")
    down: float = float("inf")
    latency: float = 0.0

    def seconds(self, work: KernelWork) -> float:
        """Return the seconds of a call: the larger of memory and compute time, plus launch and transfers."""
        crossing = work.up / self.up + work.down / self.down + self.latency * ((work.up > 0) + (work.down > 0))
        return self.launch + crossing + max(work.nbytes / self.memory, work.operations / self.operations)


def product(run: RunLayout, tokens: int, *parts: str) -> KernelWork:
    """Return the work of multiplying `tokens` vectors by `parts` of a run; by all parts if none is named."""
    vectors = run.units * run.width
    chosen = [part for part in run.parts if not parts or part.name in parts]
    nbytes = sum(vectors * part.vector_bytes(run.hidden) for part in chosen)
    return KernelWork(nbytes, 2.0 * tokens * vectors * run.hidden * len(chosen))


def projecting(spec: AttentionSpec, tokens: int) -> KernelWork:
    """Return the work of one call of `Kernels.project`."""
    latent = product(spec.latent.run, tokens) if spec.latent else KernelWork()
    own = spec.query_latent
    q = product(own.run, tokens) + product(own.up, tokens) if own else product(spec.query, tokens, "q")
    return latent + q + product(spec.kv, tokens, "k", "v")


def attending(spec: AttentionSpec, keys: KvArray, values: KvArray, batch: Batch) -> KernelWork:
    """Return the work of `Kernels.attend`: scores and sums of each token with every token that it attends to."""
    first = np.maximum(batch.positions - spec.window + 1, 0) if spec.window else np.zeros_like(batch.positions)
    pairs = int((batch.positions - first + 1).sum())
    begins, ends = np.full(len(batch.tables), np.iinfo(np.int32).max), np.full(len(batch.tables), -1)
    np.minimum.at(begins, batch.sequence, first)
    np.maximum.at(ends, batch.sequence, batch.positions)
    cached = int(np.maximum(ends - begins + 1, 0).sum())
    vectors = cached * spec.kv_heads
    nbytes = vectors * (keys.shape[-1] * keys.itemsize + values.shape[-1] * values.itemsize)
    return KernelWork(nbytes, 4.0 * pairs * spec.heads * spec.head_dim)


def ffn(spec: FfnSpec, tokens: int, active: I32 | None) -> KernelWork:
    """Return the work of `Kernels.ffn`; inactive neurons are neither read nor computed."""
    whole = product(spec.neuron, tokens)
    if active is None:
        return whole
    share = len(active) / max(1, spec.neuron.units * spec.neuron.width)
    return KernelWork(share * whole.nbytes, share * whole.operations)


def routing(router: RouterSpec, tokens: int) -> KernelWork:
    """Return the work of `Kernels.route` without the transfer of its input; choosing counts as nothing."""
    crossing = 2 * _F32 * tokens * router.mixture.used
    return KernelWork(router.weight.nbytes, 2.0 * tokens * router.weight.size, down=crossing)


def experts(spec: ExpertsSpec, tokens: int, chosen: Routing | None) -> KernelWork:
    """Return the work of `Kernels.experts`: each chosen piece is read once.

    Without a routing, no two tokens are assumed to choose the same expert.
    """
    return pieces(spec, [*range(len(spec.pieces)), SHARED], tokens, chosen)


def pieces(spec: ExpertsSpec, numbers: Iterable[int], tokens: int, chosen: Routing | None) -> KernelWork:
    """Return the work of `Kernels.expert_pieces` for the pieces that `numbers` lists.

    If `chosen` is None, no two tokens are assumed to choose the same expert.
    """
    todo, every = KernelWork(), spec.router.mixture.experts
    counts = np.bincount(chosen.experts.ravel(), minlength=every) if chosen else np.arange(every) < tokens * _used(spec)
    for number in numbers:
        if number == SHARED:
            todo += ffn(spec.shared, tokens, None) if spec.shared else KernelWork()
        elif counts[(piece := spec.pieces[number]).expert]:
            todo += product(replace(spec.routed.neuron, units=piece.units), int(counts[piece.expert]))
    return todo


def _used(spec: ExpertsSpec) -> int:
    return spec.router.mixture.used


def block(each: ChainBlock, batch: Batch) -> KernelWork:
    """Return the work of a block of a chain with its residual connection; its activations do not cross the link."""
    tokens, spec = len(batch.positions), each.spec
    residual = KernelWork(3.0 * _F32 * tokens * spec.hidden)
    if isinstance(spec, FfnSpec):
        return ffn(spec, tokens, None) + residual
    if isinstance(spec, ExpertsSpec):
        return routing(spec.router, tokens) + experts(spec, tokens, None) + residual
    if isinstance(spec, RecurrentSpec):
        raise refused("an emulated device")
    assert each.keys is not None  # an attention block has pages
    assert each.values is not None
    products = projecting(spec, tokens) + product(spec.query, tokens, "o")
    return products + attending(spec, each.keys, each.values, batch) + residual

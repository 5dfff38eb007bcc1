"""Kernels in emulated time: each call takes as long as it would on the emulated machine."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from tpi.devices.emulated import work
from tpi.devices.emulated.lane import TimedLane
from tpi.devices.emulated.work import KernelWork, Roofline, product
from tpi.kernels import Chain, Kernels
from tpi.kernels.recurrent.states import refused
from tpi.kernels.spec import (
    F32,
    I32,
    I64,
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

T = TypeVar("T")
_F32 = 4  # bytes


class TimedKernels:
    """Kernels that return the results of other kernels, each when its emulated time on a lane has passed.

    `tpi.devices.emulated.work` counts the bytes and operations of each call.
    """

    def __init__(self, kernels: Kernels, lane: TimedLane, rates: Roofline) -> None:
        self._inner, self._lane, self._rates = kernels, lane, rates

    def isa(self) -> str:
        """Return the name of the instruction set in use."""
        return self._inner.isa()

    def set_threads(self, count: int) -> None:
        """Use `count` threads for every later call; emulated time does not depend on it."""
        self._inner.set_threads(count)

    def threads(self) -> int:
        """Return the number of threads that take part in a call."""
        return self._inner.threads()

    def read(self, data: U8) -> None:
        """Read the 1-D bytes `data` with all threads and compute nothing, to measure the memory's bandwidth."""
        self._run("read", KernelWork(data.nbytes), lambda: self._inner.read(data))

    def norm(self, norm: NormSpec, x: F32) -> F32:
        """Return the norm of the hidden states `x`, float32 `[tokens, hidden]`."""
        todo = KernelWork(2 * x.nbytes, up=x.nbytes, down=x.nbytes)
        return self._run("norm", todo, lambda: self._inner.norm(norm, x))

    def prepare(self, spec: BlockSpec, x: Input, into: Prepared | None = None) -> Prepared:
        """Return the norm of the input `x`, in the form that the block's segments use; it stays on the device."""
        size = _size(x)
        return self._run("prepare", KernelWork(2 * size, up=size), lambda: self._inner.prepare(spec, x, into))

    def attention(self, spec: AttentionSpec, data: U8, x: Input, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """Return a segment's partial sum of an attention block, float32 `[tokens, hidden]`."""
        tokens = x.shape[0]
        todo = work.projecting(spec, tokens) + work.attending(spec, keys, values, batch)
        todo += product(spec.query, tokens, "o") + _crossing(x)
        return self._run("attention", todo, lambda: self._inner.attention(spec, data, x, keys, values, batch))

    def project(self, spec: AttentionSpec, data: U8, x: Input, positions: I32) -> Projected:
        """Return the queries, keys and values of the tokens at `positions`; they stay on the device."""
        todo = work.projecting(spec, x.shape[0]) + KernelWork(up=_crossing(x).up)
        return self._run("project", todo, lambda: self._inner.project(spec, data, x, positions))

    def attend(self, spec: AttentionSpec, projected: Projected, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """Append keys and values to the cache, then attend; the result stays on the device."""
        todo = work.attending(spec, keys, values, batch)
        return self._run("attend", todo, lambda: self._inner.attend(spec, projected, keys, values, batch))

    def output(self, spec: AttentionSpec, data: U8, mixed: F32) -> F32:
        """Return the output projection of `mixed`, the result of `attend`: float32 `[tokens, hidden]`."""
        todo = product(spec.query, len(mixed), "o") + KernelWork(down=_F32 * len(mixed) * spec.hidden)
        return self._run("output", todo, lambda: self._inner.output(spec, data, mixed))

    def recur(self, spec: RecurrentSpec, data: U8, x: Input, states: F32, batch: Batch) -> F32:
        """Raise KernelError: no accelerator computes recurrent blocks."""
        raise refused(self._inner.isa())

    def ffn(self, spec: FfnSpec, data: U8, x: Input, active: I32 | None = None) -> F32:
        """Return a segment's partial sum of a feed-forward block, float32 `[tokens, hidden]`."""
        todo = work.ffn(spec, x.shape[0], active) + _crossing(x)
        return self._run("ffn", todo, lambda: self._inner.ffn(spec, data, x, active))

    def route(self, router: RouterSpec, x: Input) -> Routing:
        """Return the experts that each token chooses; the choice is transferred to the host."""
        todo = work.routing(router, x.shape[0]) + KernelWork(up=_crossing(x).up)
        return self._run("route", todo, lambda: self._inner.route(router, x))

    def experts(self, spec: ExpertsSpec, data: U8, x: Input, routing: Routing) -> F32:
        """Return a segment's partial sum of a block of experts, float32 `[tokens, hidden]`."""
        todo = work.experts(spec, x.shape[0], routing) + _crossing(x)
        return self._run("experts", todo, lambda: self._inner.experts(spec, data, x, routing))

    def expert_pieces(self, spec: ExpertsSpec, data: Mapping[int, U8], x: Input, routing: Routing) -> F32:
        """Return the summed outputs of the expert pieces whose weights are in `data`, float32 `[tokens, hidden]`."""
        todo = work.pieces(spec, data, x.shape[0], routing) + _crossing(x)
        return self._run("experts", todo, lambda: self._inner.expert_pieces(spec, data, x, routing))

    def add_residual(self, residual: Residual, x: F32, total: F32) -> F32:
        """Return `x` plus the sum over all nodes, `total`, to which bias and norm of `residual` are applied first."""
        todo = KernelWork(3 * x.nbytes, up=2 * x.nbytes, down=x.nbytes)
        return self._run("residual", todo, lambda: self._inner.add_residual(residual, x, total))

    def open_chain(self, blocks: Sequence[ChainBlock]) -> Chain:
        """Return a chain that runs `blocks` in order."""
        return TimedChain(self._inner.open_chain(blocks), blocks, self._lane, self._rates)

    def logits(self, run: RunLayout, data: U8, x: F32) -> F32:
        """Return the products of `x` with each row of a table, float32 `[tokens, units * width]`."""
        out = _F32 * len(x) * run.units * run.width
        todo = product(run, len(x)) + KernelWork(up=x.nbytes, down=out)
        return self._run("logits", todo, lambda: self._inner.logits(run, data, x))

    def gather(self, run: RunLayout, data: U8, rows: I32) -> F32:
        """Return the rows of a table that `rows` lists by number, float32 `[len(rows), hidden]`."""
        todo = KernelWork(len(rows) * run.record_bytes, down=_F32 * len(rows) * run.hidden)
        return self._run("gather", todo, lambda: self._inner.gather(run, data, rows))

    def dequantise(self, run: RunLayout, data: U8, part: str) -> F32:
        """Return the part of a run called `part`, dequantised to float32 `[units * width, hidden]`."""
        out = _F32 * run.units * run.width * run.hidden
        todo = KernelWork(product(run, 0, part).nbytes, down=out)
        return self._run("dequantise", todo, lambda: self._inner.dequantise(run, data, part))

    def _run(self, what: str, todo: KernelWork, call: Callable[[], T]) -> T:
        return self._lane.run(what, self._rates.seconds(todo), call)


class TimedChain:
    """A chain of blocks (`tpi.kernels.Chain`), timed as one task."""

    def __init__(self, chain: Chain, blocks: Sequence[ChainBlock], lane: TimedLane, rates: Roofline) -> None:
        self._chain, self._blocks, self._lane, self._rates = chain, blocks, lane, rates

    def run(self, x: F32, batch: Batch, ended: I64 | None = None) -> F32:
        """Return `x` after all blocks; set `ended` to the emulated end of each block."""
        seconds = [self._rates.seconds(work.block(block, batch)) for block in self._blocks]
        seconds[0] += self._rates.seconds(KernelWork(up=x.nbytes, down=x.nbytes)) - self._rates.launch
        out = self._lane.run("chain", sum(seconds), lambda: self._chain.run(x, batch, ended))
        if ended is not None:
            ended[:] = np.cumsum(seconds) * self._lane.stretch * 1e9
        return out


def _size(x: Input) -> int:
    tokens, hidden = x.shape
    return _F32 * int(tokens) * int(hidden)


def _crossing(x: Input) -> KernelWork:
    """Return the work of moving activations over the link: the block's input, and an output of the same size.

    An input that was prepared on the device does not cross the link.
    """
    return KernelWork(up=_size(x) if isinstance(x, np.ndarray) else 0, down=_size(x))

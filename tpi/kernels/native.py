"""The C++ kernels as `tpi.kernels.Kernels`: a native plan is cached in each spec, and results are allocated.

All checks of dtype, shape, alignment and contiguity are in C++ and raise `KernelError`. Calls release the interpreter's
lock. The thread pool and the instruction set belong to the process, not to an instance. Calls from several Python
threads take turns, since each uses all cores.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

import numpy as np

from tpi.errors import KernelError
from tpi.kernels import _native
from tpi.kernels.arithmetic import add_normed
from tpi.kernels.constants import THREADS_MOST
from tpi.kernels.heads import needs_sums, refuse_sums, without_norms
from tpi.kernels.nativefields import PLAN, latent_fields, norm_fields, query_latent_fields, run_fields
from tpi.kernels.recurrent.nativeplans import plan_recurrent
from tpi.kernels.recurrent.squares import attach
from tpi.kernels.recurrent.states import slots
from tpi.kernels.spec import (
    F32,
    I32,
    I64,
    SHARED,
    U8,
    AttentionSpec,
    Batch,
    BlockSpec,
    ChainBlock,
    ExpertsSpec,
    FfnSpec,
    Input,
    KvArray,
    MambaSpec,
    NormSpec,
    Prepared,
    Projected,
    RecurrentSpec,
    Residual,
    RouterSpec,
    Routing,
)
from tpi.pack.layout import RunLayout
from tpi.system.machine import usable_cores


class NativeKernels:
    """The operations of `tpi.kernels.Kernels`, implemented in C++."""

    def __init__(self, isa: str = "") -> None:
        """Start the thread pool, and use `isa` from now on in the whole process.

        If `isa` is empty, the instruction set does not change; it is at first the best that the machine supports.
        """
        _start_pool()
        if isa:
            self.use_isa(isa)

    def isa(self) -> str:
        """Return the name of the instruction set in use."""
        return _native.isa()

    def available_isas(self) -> list[str]:
        """Return the names of the instruction sets that this machine and this build support, the best first."""
        return _native.available_isas()

    def use_isa(self, name: str) -> None:
        """Use another instruction set for every later call; raise KernelError if this machine lacks it."""
        _native.use_isa(name)

    def set_threads(self, count: int) -> None:
        """Use `count` threads, the caller's included, for every later call.

        Raises:
            KernelError: if `count` is not in 1..`THREADS_MOST`, or the system cannot start so many threads; one thread
                is then used.
        """
        _native.set_threads(count)

    def threads(self) -> int:
        """Return the number of threads that take part in a call."""
        return _native.threads()

    def read(self, data: U8) -> None:
        """Read the 1-D bytes `data` with all threads and compute nothing, to measure the memory's bandwidth."""
        _native.read(data)

    def norm(self, norm: NormSpec, x: F32) -> F32:
        """Return the norm of the hidden states `x`, float32 `[tokens, hidden]`."""
        out = np.empty(x.shape, np.float32)
        _native.norm(x, norm_fields(norm), out)
        return out

    def prepare(self, spec: BlockSpec, x: Input, into: Prepared | None = None) -> NativePrepared:
        """Return the norm of the input `x` on this device, in the form that the block's segments use.

        An `x` that is prepared already is not normed again, but rounded for the rows of `spec`.
        """
        normed = not isinstance(x, np.ndarray)
        values = x if isinstance(x, np.ndarray) else x.values()
        made = into if isinstance(into, NativePrepared) else NativePrepared()
        plan = _plan(spec)
        plan.prepare(values, normed, made.native)
        return made

    def attention(self, spec: AttentionSpec, data: U8, x: Input, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """Return a segment's partial sum of an attention block, float32 `[tokens, hidden]`."""
        refuse_sums(spec)
        plan = _plan_attention(spec)
        out = np.empty(x.shape, np.float32)
        plan.run(data, _given(x), keys, values, batch.positions, batch.sequence, batch.tables, out)
        return out

    def project(self, spec: AttentionSpec, data: U8, x: Input, positions: I32) -> Projected:
        """Return the queries, keys and values of the tokens at `positions`."""
        if needs_sums(spec):
            spec = without_norms(spec)
        queries = np.empty((x.shape[0], spec.heads, spec.head_dim), np.float32)
        keys, values = (np.empty((x.shape[0], spec.kv_heads, spec.head_dim), np.float32) for _ in range(2))
        gate = np.empty((x.shape[0], spec.heads * spec.head_dim), np.float32) if spec.output_gate else None
        _plan_attention(spec).project(data, _given(x), positions, (queries, keys, values, gate))
        return Projected(queries, keys, values, gate)

    def attend(self, spec: AttentionSpec, projected: Projected, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """Append keys and values to the cache, then return the attention of all heads, `[tokens, heads * head_dim]`."""
        out = np.empty((len(batch.positions), spec.heads * spec.head_dim), np.float32)
        heads = (projected.queries, projected.keys, projected.values, projected.gate)
        _plan_attention(spec).attend(heads, keys, values, batch.positions, batch.sequence, batch.tables, out)
        return out

    def output(self, spec: AttentionSpec, data: U8, mixed: F32) -> F32:
        """Return the output projection of `mixed`, the result of `attend`: float32 `[tokens, hidden]`."""
        out = np.empty((len(mixed), spec.hidden), np.float32)
        _plan_attention(spec).output(data, mixed, out)
        return out

    def recur(self, spec: RecurrentSpec, data: U8, x: Input, states: F32, batch: Batch) -> F32:
        """Return a segment's partial sum of a block with states, `[tokens, hidden]`. Write the states."""
        out, spread = np.empty(x.shape, np.float32), spec.spread if isinstance(spec, MambaSpec) else None
        squares = None if spread is None else np.empty(len(out), np.float32)
        plan_recurrent(spec).run(data, _given(x), states, batch.sequence, slots(batch), out, squares)
        return out if spread is None or squares is None else attach(out, squares, spread)

    def ffn(self, spec: FfnSpec, data: U8, x: Input, active: I32 | None = None) -> F32:
        """Return a segment's partial sum of a feed-forward block, float32 `[tokens, hidden]`."""
        plan = _plan_ffn(spec)
        out = np.empty(x.shape, np.float32)
        plan.run(data, _given(x), active, out)
        return out

    def route(self, router: RouterSpec, x: Input) -> Routing:
        """Return the experts that each token chooses, with their weights."""
        shape = (x.shape[0], router.mixture.used)
        shared = None if router.shared is None else np.empty(x.shape[0], np.float32)
        chosen = Routing(np.empty(shape, np.int32), np.empty(shape, np.float32), shared)
        _plan_router(router).route(_given(x), chosen.experts, chosen.weights, chosen.shared)
        return chosen

    def experts(self, spec: ExpertsSpec, data: U8, x: Input, routing: Routing) -> F32:
        """Return a segment's partial sum of a block of experts, float32 `[tokens, hidden]`."""
        out = np.empty(x.shape, np.float32)
        _plan_experts(spec).run(data, _given(x), routing.experts, routing.weights, routing.shared, out)
        return out

    def expert_pieces(self, spec: ExpertsSpec, data: Mapping[int, U8], x: Input, routing: Routing) -> F32:
        """Return the summed outputs of the expert pieces whose weights are in `data`, float32 `[tokens, hidden]`."""
        out = np.empty(x.shape, np.float32)
        pieces = [(number, weights) for number, weights in data.items() if number != SHARED]
        plan, beside = _plan_experts(spec), data.get(SHARED)
        plan.run_pieces(pieces, beside, _given(x), routing.experts, routing.weights, routing.shared, out)
        return out

    def add_residual(self, residual: Residual, x: F32, total: F32) -> F32:
        """Return `x` plus the sum over all nodes, `total`, to which bias and norm of `residual` are applied first."""
        return add_normed(residual, x, total, self.norm)

    def open_chain(self, blocks: Sequence[ChainBlock]) -> NativeChain:
        """Return a chain of blocks.

        Raises:
            KernelError: if blocks differ in hidden size, or an array does not fit its plan.
        """
        return NativeChain(blocks)

    def logits(self, run: RunLayout, data: U8, x: F32) -> F32:
        """Return the products of `x` with each row of a table, float32 `[tokens, units * width]`."""
        out = np.empty((len(x), run.units * run.width), np.float32)
        _plan_run(run).rows(data, x, out)
        return out

    def gather(self, run: RunLayout, data: U8, rows: I32) -> F32:
        """Return the rows of a table that `rows` lists by number, float32 `[len(rows), hidden]`."""
        out = np.empty((len(rows), run.hidden), np.float32)
        _plan_run(run).gather(data, rows, out)
        return out

    def dequantise(self, run: RunLayout, data: U8, part: str) -> F32:
        """Return the part of a run called `part`, dequantised to float32 `[units * width, hidden]`."""
        out = np.empty((run.units * run.width, run.hidden), np.float32)
        _plan_run(run).decode(data, part, out)
        return out


class NativePrepared:
    """A block's input, prepared for the C++ kernels (`tpi.kernels.spec.Prepared`). One call may use it at a time."""

    __slots__ = ("native",)

    def __init__(self) -> None:
        self.native = _native.Prepared()

    @property
    def shape(self) -> tuple[int, int]:
        """Number of tokens and hidden size: `(tokens, hidden)`."""
        return self.native.shape

    def values(self) -> F32:
        """Return a copy of the normed input, `[tokens, hidden]`."""
        out = np.empty(self.shape, np.float32)
        self.native.copy(out)
        return out


class NativeChain:
    """A chain of blocks (`tpi.kernels.Chain`) in C++."""

    def __init__(self, blocks: Sequence[ChainBlock]) -> None:
        """Create the chain.

        Raises:
            KernelError: if blocks differ in hidden size, or an array does not fit its plan.
        """
        self._native = _native.Chain(blocks[0].spec.hidden if blocks else 0)
        for block in blocks:
            if block.residual.stacked is not None:
                raise KernelError("a block that shares its sum with another cannot be part of a chain")
            norm = block.residual.norm
            residual = (block.residual.bias, None if norm is None else norm_fields(norm), block.residual.scale)
            if isinstance(block.spec, FfnSpec):
                self._native.ffn(_plan_ffn(block.spec), block.data, residual)
            elif isinstance(block.spec, ExpertsSpec):
                self._native.experts(_plan_experts(block.spec), block.data, residual)
            elif isinstance(block.spec, RecurrentSpec):
                self._native.recur(plan_recurrent(block.spec), block.data, block.states, residual)
            else:
                self._native.attention(_plan_attention(block.spec), block.data, block.keys, block.values, residual)

    def run(self, x: F32, batch: Batch, ended: I64 | None = None) -> F32:
        """Return `x`, `[tokens, hidden]`, after all blocks and their residual connections."""
        out: F32 = x.copy()
        self._native.run(out, batch.positions, batch.sequence, batch.tables, batch.states, np.empty_like(out), ended)
        return out


def _given(x: Input) -> F32 | _native.Prepared:
    """Return the argument that native plans take: an array, or the native object of a prepared input."""
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, NativePrepared):
        return x.native
    raise KernelError("this input was prepared by other kernels; call prepare() of these kernels")


@lru_cache(maxsize=64)
def _plan_run(run: RunLayout) -> _native.RunPlan:
    return _native.RunPlan(run_fields(run))


def _plan_attention(spec: AttentionSpec) -> _native.AttentionPlan:
    plan: _native.AttentionPlan | None = vars(spec).get(PLAN)
    if plan is None:
        q_norm, k_norm = (spec.whole.q, spec.whole.k) if spec.whole else (spec.q_norm, spec.k_norm)
        plan = vars(spec)[PLAN] = _native.AttentionPlan(
            run_fields(spec.query),
            run_fields(spec.kv),
            norm_fields(spec.norm),
            (spec.heads, spec.kv_heads, spec.head_dim),
            spec.kv_index,
            (spec.q_bias, spec.k_bias, spec.v_bias, q_norm, k_norm, spec.inv_freq, spec.sinks, spec.v_norm),
            (
                spec.rope_scale,
                spec.attention_scale,
                spec.softcap,
                spec.window,
                spec.clip,
                spec.whole is not None,
                spec.growth,
                spec.growth_tokens,
                spec.late_norms,
                spec.shared,
            ),
            None if spec.latent is None else latent_fields(spec.latent),
            None if spec.query_latent is None else query_latent_fields(spec.query_latent),
        )
    return plan


def _plan_ffn(spec: FfnSpec) -> _native.FfnPlan:
    plan: _native.FfnPlan | None = vars(spec).get(PLAN)
    if plan is None:
        plan = vars(spec)[PLAN] = _native.FfnPlan(
            run_fields(spec.neuron),
            norm_fields(spec.norm),
            spec.activation,
            spec.gated,
            spec.gate_bias,
            spec.up_bias,
            spec.threshold,
            spec.slope,
        )
    return plan


def _plan(spec: BlockSpec) -> _native.AttentionPlan | _native.RecurrentPlan | _native.FfnPlan | _native.ExpertsPlan:
    if isinstance(spec, ExpertsSpec):
        return _plan_experts(spec)
    if isinstance(spec, RecurrentSpec):
        return plan_recurrent(spec)
    return _plan_ffn(spec) if isinstance(spec, FfnSpec) else _plan_attention(spec)


def _plan_router(spec: RouterSpec) -> _native.RouterPlan:
    plan: _native.RouterPlan | None = vars(spec).get(PLAN)
    if plan is None:
        mixture = spec.mixture
        settings = (
            mixture.experts, mixture.used, mixture.scores == "sigmoid", mixture.normalised, mixture.scale,
            mixture.groups, mixture.groups_used, mixture.group_best,
        )  # fmt: skip
        plan = vars(spec)[PLAN] = _native.RouterPlan(
            settings, norm_fields(spec.norm), spec.weight, spec.bias, spec.choice, spec.shared, spec.factors
        )
    return plan


def _plan_experts(spec: ExpertsSpec) -> _native.ExpertsPlan:
    plan: _native.ExpertsPlan | None = vars(spec).get(PLAN)
    if plan is None:
        shared = None if spec.shared is None else _plan_ffn(spec.shared)
        pieces = [(piece.expert, piece.units) for piece in spec.pieces]
        begins = [piece.begins for piece in spec.pieces]
        plan = vars(spec)[PLAN] = _native.ExpertsPlan(
            _plan_router(spec.router), _plan_ffn(spec.routed), shared, pieces, spec.down_bias, begins
        )
    return plan


@cache
def _start_pool() -> None:
    """Start one thread for each core; if that fails, print the reason and compute with one thread."""
    try:
        _native.set_threads(min(usable_cores(), THREADS_MOST))
    except KernelError as error:
        sys.stderr.write(f"tpi: computing with one thread: {error}\n")

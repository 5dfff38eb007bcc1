"""Every kernel in plain numpy; it defines the results of the native ones.

Slow and simple: each call dequantises the weights it reads. Activations that are multiplied with q8, q4 and q4s weights
are first rounded in groups of 32 (to 15 bits for q8, else to int8), as in the native kernels. Row parts always round;
column parts round in the tiled layout. One difference remains: for 4-bit columns in records, the native kernels round
activation times scale to int8 over 8 neurons at a time.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np

from tpi.errors import KernelError
from tpi.kernels.arithmetic import (
    activate,
    add_residual,
    apply_norm,
    biased,
    check_data,
    check_input,
    check_range,
    columns,
    dequantise,
    rows,
    sigmoid,
)
from tpi.kernels.chain import PlainChain
from tpi.kernels.heads import apply_norms_and_rope, from_latent, from_query_latent, needs_sums, refuse_sums
from tpi.kernels.kv import kv_dtype_of
from tpi.kernels.mixture import Normed, check_experts, choose, experts_by_ffn, pieces_by_ffn
from tpi.kernels.paged import append_keys, append_values, attend, hadamard_rotate, heads_of
from tpi.kernels.recurrent import conv, delta, mamba
from tpi.kernels.recurrent.squares import attach
from tpi.kernels.spec import (
    F32,
    I32,
    U8,
    AttentionSpec,
    Batch,
    BlockSpec,
    ChainBlock,
    ConvSpec,
    ExpertsSpec,
    FfnSpec,
    HeadsSpec,
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


class ReferenceKernels:
    """The operations of `tpi.kernels.Kernels`, implemented in numpy."""

    def set_threads(self, count: int) -> None:
        """Do nothing, because numpy's BLAS chooses its own number of threads."""

    def threads(self) -> int:
        """Return 1; the threads of BLAS are not counted."""
        return 1

    def isa(self) -> str:
        """Return "numpy"."""
        return "numpy"

    def read(self, data: U8) -> None:
        """Read the 1-D bytes `data` with all threads and compute nothing, to measure the memory's bandwidth."""
        data.max(initial=0)

    def norm(self, norm: NormSpec, x: F32) -> F32:
        """Return the norm of the hidden states `x`, float32 `[tokens, hidden]`."""
        return apply_norm(norm, x)

    def prepare(self, spec: BlockSpec, x: Input, into: Prepared | None = None) -> Normed:
        """Return the norm of `x`, not rounded, because each product rounds its own input."""
        return Normed(_normed(spec, x))

    def attention(self, spec: AttentionSpec, data: U8, x: Input, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """Return a segment's partial sum of an attention block, float32 `[tokens, hidden]`."""
        refuse_sums(spec)
        projected = self.project(spec, data, x, batch.positions)
        return self.output(spec, data, self.attend(spec, projected, keys, values, batch))

    def project(self, spec: AttentionSpec, data: U8, x: Input, positions: I32) -> Projected:
        """Return the queries, keys and values of the tokens at `positions`."""
        normed, (latent_data, *up_data, query_data, kv_data) = _normed(spec, x), _runs(spec, data)
        if spec.query_latent is not None:
            q = from_query_latent(spec.query_latent, up_data[0], up_data[1], normed)
        else:
            q = rows(spec.query, query_data, "q", normed)
        q = heads_of(q, spec.q_bias, spec.heads, spec.head_dim)
        if spec.shared:
            k = v = np.zeros((len(normed), spec.kv_heads, spec.head_dim), np.float32)
        elif spec.latent is not None:
            k, v = from_latent(spec, spec.latent, latent_data, kv_data, normed)
        else:
            k = heads_of(rows(spec.kv, kv_data, "k", normed), spec.k_bias, spec.kv_heads, spec.head_dim)
            v = heads_of(rows(spec.kv, kv_data, "v", normed), spec.v_bias, spec.kv_heads, spec.head_dim)
        gate = None
        if spec.output_gate:
            gate = np.ascontiguousarray(rows(spec.query, query_data, "gate", normed)[:, : spec.heads * spec.head_dim])
        heads = Projected(q, k, v, gate)
        return heads if needs_sums(spec) else apply_norms_and_rope(spec, heads, positions)

    def attend(self, spec: AttentionSpec, projected: Projected, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """Append keys and values to the cache, then return the attention of all heads, `[tokens, heads * head_dim]`."""
        met = hadamard_rotate if kv_dtype_of(keys) == "q4" else np.asarray
        if not spec.shared:
            append_keys(keys, met(projected.keys), batch)
            append_values(values, projected.values, batch)
        mixed = attend(spec, met(projected.queries), keys, values, batch)
        mixed = mixed.reshape(len(mixed), spec.heads * spec.head_dim)
        return mixed if projected.gate is None else mixed * sigmoid(projected.gate)

    def output(self, spec: AttentionSpec, data: U8, mixed: F32) -> F32:
        """Return the output projection of `mixed`, the result of `attend`: float32 `[tokens, hidden]`."""
        tokens = check_input(mixed, spec.heads * spec.head_dim)
        padded = np.zeros((tokens, spec.query.units * spec.query.width), np.float32)
        padded[:, : spec.heads * spec.head_dim] = mixed
        return columns(spec.query, _runs(spec, data)[-2], "o", padded)

    def recur(self, spec: RecurrentSpec, data: U8, x: Input, states: F32, batch: Batch) -> F32:
        """Return a segment's partial sum of a block with states, `[tokens, hidden]`. Write the states."""
        normed = _normed(spec, x)
        squares, spread = normed[:0], None
        if isinstance(spec, ConvSpec):
            mixed = _convolve(spec, data, normed, states, batch)
        elif isinstance(spec, MambaSpec):
            mixed, squares = mamba.mix(spec, *_heads(spec, data, normed), states, batch)
            spread = spec.spread
        else:
            mixed = delta.mix(spec, *_heads(spec, data, normed), states, batch)
        padded = np.zeros((len(normed), spec.values.units * spec.values.width), np.float32)
        padded[:, : mixed.shape[1]] = mixed
        out = columns(spec.values, data[: spec.values.units * spec.values.unit_bytes], "o", padded)
        return out if spread is None else attach(out, squares, spread)

    def ffn(self, spec: FfnSpec, data: U8, x: Input, active: I32 | None = None) -> F32:
        """Return a segment's partial sum of a feed-forward block, float32 `[tokens, hidden]`."""
        run, normed = spec.neuron, _normed(spec, x)
        check_data(data, run.units * run.unit_bytes)
        up = biased(rows(run, data, "up", normed), spec.up_bias)
        gate = biased(rows(run, data, "gate", normed), spec.gate_bias) if spec.gated else None
        inner = activate(spec, gate, up)
        return columns(run, data, "down", inner if active is None else _only_active(run, active, inner))

    def route(self, router: RouterSpec, x: Input) -> Routing:
        """Return the experts that each token chooses, with their weights."""
        return choose(router, _normed(router, x))

    def experts(self, spec: ExpertsSpec, data: U8, x: Input, routing: Routing) -> F32:
        """Return a segment's partial sum of a block of experts, float32 `[tokens, hidden]`."""
        check_experts(spec, data)
        return experts_by_ffn(self, spec, data, _normed(spec, x), routing)

    def expert_pieces(self, spec: ExpertsSpec, data: Mapping[int, U8], x: Input, routing: Routing) -> F32:
        """Return the summed outputs of the expert pieces whose weights are in `data`, float32 `[tokens, hidden]`."""
        return pieces_by_ffn(self, spec, data, _normed(spec, x), routing)

    def add_residual(self, residual: Residual, x: F32, total: F32) -> F32:
        """Return `x` plus the sum over all nodes, `total`, to which bias and norm of `residual` are applied first."""
        return add_residual(residual, x, total)

    def open_chain(self, blocks: Sequence[ChainBlock]) -> PlainChain:
        """Return a chain that runs `blocks` in order."""
        return PlainChain(self, blocks)

    def logits(self, run: RunLayout, data: U8, x: F32) -> F32:
        """Return the products of `x` with each row of a table, float32 `[tokens, units * width]`."""
        return rows(run, data, run.parts[0].name, x)

    def gather(self, run: RunLayout, data: U8, rows: I32) -> F32:
        """Return the rows of a table that `rows` lists by number, float32 `[len(rows), hidden]`."""
        check_range("row", rows, run.units * run.width)
        return np.ascontiguousarray(dequantise(run, data, run.parts[0].name)[rows])

    def dequantise(self, run: RunLayout, data: U8, part: str) -> F32:
        """Return the part of a run called `part`, dequantised to float32 `[units * width, hidden]`."""
        return dequantise(run, data, part)


def _normed(spec: BlockSpec | RouterSpec, x: Input) -> F32:
    hidden = spec.weight.shape[1] if isinstance(spec, RouterSpec) else spec.hidden
    if isinstance(x, np.ndarray):
        check_input(x, hidden)
        return apply_norm(spec.norm, x)
    values = x.values()
    check_input(values, hidden)
    return values


def _only_active(run: RunLayout, active: I32, inner: F32) -> F32:
    """Return `inner`, `[tokens, neurons]`, with zeros for neurons that are not active."""
    if run.layout != "record":
        raise KernelError("a list of active neurons needs a pack in the record layout; this one is tiled")
    check_range("active neuron", active, run.units * run.width)
    mask = np.zeros(run.units * run.width, np.bool_)
    mask[active] = True
    return np.asarray(np.where(mask, inner, np.float32(0)), np.float32)


def _runs(spec: AttentionSpec, data: U8) -> list[U8]:
    """Split a block's weights into the units of its runs, in the order in which they are stored.

    - `latent`, empty if keys and values have no latent vector;
    - `query_latent` and `query_up`, both left out if queries have no latent vector;
    - `query` and `kv`.
    """
    own = (spec.query_latent.run, spec.query_latent.up) if spec.query_latent else ()
    runs = (spec.latent.run if spec.latent else None, *own, spec.query, spec.kv)
    ends = list(accumulate(0 if run is None else run.units * run.unit_bytes for run in runs))
    check_data(data, ends[-1])
    return [data[first:end] for first, end in pairwise([0, *ends])]


def _heads(spec: HeadsSpec, data: U8, normed: F32) -> tuple[F32, F32, F32]:
    """Return the heads' q, k and v before the convolution, `[tokens, channels]`; `normed`; and the heads' gate."""
    end = spec.values.units * spec.values.unit_bytes
    check_data(data, end + spec.keys.units * spec.keys.unit_bytes)
    width, wide = spec.key_heads * spec.key, spec.heads * spec.value
    q, k = (rows(spec.keys, data[end:], part, normed)[:, :width] for part in ("q", "k"))
    v, gate = (rows(spec.values, data[:end], part, normed)[:, :wide] for part in ("v", "gate"))
    return np.concatenate([q, k, v], axis=1), normed, gate


def _convolve(spec: ConvSpec, data: U8, normed: F32, states: F32, batch: Batch) -> F32:
    check_data(data, spec.values.units * spec.values.unit_bytes)
    v, inputs, gate = (rows(spec.values, data, part, normed)[:, : spec.channels] for part in ("v", "input", "gate"))
    return conv.mix(spec, inputs * v, gate, states, batch)

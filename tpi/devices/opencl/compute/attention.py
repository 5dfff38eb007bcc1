"""An attention block on an OpenCL device, in steps: project heads, attend over pages, multiply with o."""

from dataclasses import dataclass
from typing import Any

from tpi.devices.checks import kv_format
from tpi.devices.opencl.card import LANES, OpenClCard
from tpi.devices.opencl.compute.activations import CardActivations
from tpi.devices.opencl.compute.products import columns, matrix_of, rows
from tpi.devices.opencl.compute.tables import AttentionStep
from tpi.devices.opencl.discover import opencl
from tpi.devices.opencl.programs import Program
from tpi.kernels.spec import F32, KV_GROUP, PAGE_TOKENS, U8, AttentionSpec, KvArray

_HEADS = Program(("heads",))


@dataclass(frozen=True)
class HeadBuffers:
    """Queries, keys and values in float32 buffers, like `tpi.kernels.spec.Projected`."""

    queries: Any
    keys: Any
    values: Any


class AttentionBlock:
    """An attention block: the vectors of its spec on the card, and its computation."""

    def __init__(self, card: OpenClCard, spec: AttentionSpec) -> None:
        """Copy the vectors of `spec` to the card. Later calls must pass the same `spec`."""
        self._card = card
        names = ("q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "inv_freq")
        self._vectors = {name: _uploaded(card, getattr(spec, name)) for name in names}

    def project(self, spec: AttentionSpec, data: U8, x: CardActivations, positions: Any) -> HeadBuffers:
        """Return the queries, keys and values of the tokens at `positions`, a buffer of int32."""
        split = spec.query.units * spec.query.unit_bytes
        query, kv = data[:split], data[split:]
        q = rows(self._card, matrix_of(self._card, spec.query, "q", query), x)
        k = rows(self._card, matrix_of(self._card, spec.kv, "k", kv), x)
        v = rows(self._card, matrix_of(self._card, spec.kv, "v", kv), x)
        return HeadBuffers(
            self._finish(spec, "q", q, x.tokens, positions),
            self._finish(spec, "k", k, x.tokens, positions),
            self._finish(spec, "v", v, x.tokens, positions),
        )

    def attend(
        self, spec: AttentionSpec, heads: HeadBuffers, keys: KvArray, values: KvArray, step: AttentionStep
    ) -> Any:
        """Append keys and values to the cache, then return a buffer with the attention of all heads.

        The buffer is `[tokens, query units * width]`, with zeros after the last head. `step` has the tokens' positions
        and page tables.
        """
        card, program = self._card, _attending(spec, keys, step.rows_each)
        paged = (step.tables, step.table_width)
        heads = self._spread(spec, heads, keys, step)
        self._append(spec, keys, PAGE_TOKENS, heads.keys, step)
        self._append(spec, values, 1, heads.values, step)
        count = step.tokens * spec.heads
        partial = card.empty(count, step.chunks, spec.head_dim + 2)
        numbers = (spec.heads, spec.kv_heads, float(spec.attention_scale), float(spec.softcap), spec.window)
        caches = (*card.located(keys), *card.located(values))
        given = (heads.queries, *caches, step.tasks, step.rows, step.positions, *paged, *numbers, step.chunk, partial)
        card.launch(program, "attend", [step.task_count, step.chunks], *given)
        stride = spec.query.units * spec.query.width
        mixed = card.zeros(step.tokens, stride)
        card.launch(program, "merge_chunks", [count], partial, step.chunks, step.rows, spec.heads, stride, mixed)
        return mixed

    def output(self, spec: AttentionSpec, data: U8, mixed: Any, tokens: int) -> Any:
        """Return a buffer with the output projection of `mixed`, the buffer that `attend` returned."""
        o = matrix_of(self._card, spec.query, "o", data[: spec.query.units * spec.query.unit_bytes])
        return columns(self._card, o, CardActivations(self._card, mixed, tokens, o.vectors))

    def _finish(self, spec: AttentionSpec, which: str, product: Any, tokens: int, positions: Any) -> Any:
        """Return the heads in `product` after bias, norm and, except for values, RoPE. `which` is q, k or v."""
        card, dim = self._card, spec.head_dim
        heads, run = (spec.heads, spec.query) if which == "q" else (spec.kv_heads, spec.kv)
        half, out = 0 if which == "v" else len(spec.inv_freq), card.empty(tokens, heads, dim)
        bias, norm = self._vectors[f"{which}_bias"], self._vectors.get(f"{which}_norm")
        turn = (self._vectors["inv_freq"], half, float(spec.rope_scale), positions)
        room = opencl().LocalMemory(4 * dim)
        given = (product, run.units * run.width, dim, bias, norm, float(spec.norm.eps), *turn, room, out)
        card.launch(_HEADS, "finish_heads", [heads, tokens], *given)
        return out

    def _spread(self, spec: AttentionSpec, heads: HeadBuffers, cache: KvArray, step: AttentionStep) -> HeadBuffers:
        """Return the heads in the form that the cache stores: in q4, queries and keys are Hadamard-rotated."""
        if kv_format(spec, cache) != "q4":
            return heads
        card, program = self._card, _attending(spec, cache, step.rows_each)

        def spread(values: Any, count: int) -> Any:
            out, work = card.empty(count, spec.head_dim), -(-count * -(-spec.head_dim // KV_GROUP) // LANES)
            card.launch(program, "spread", [work], values, count, out)
            return out

        queries, keys = spread(heads.queries, step.tokens * spec.heads), spread(heads.keys, step.tokens * spec.kv_heads)
        return HeadBuffers(queries, keys, heads.values)

    def _append(self, spec: AttentionSpec, cache: KvArray, across: int, heads: Any, step: AttentionStep) -> None:
        """Store `heads` in the cache; `across` is PAGE_TOKENS for keys, which lie transposed, and 1 for values."""
        program = _attending(spec, cache, step.rows_each)
        work = -(-step.tokens * spec.kv_heads * -(-spec.head_dim // KV_GROUP) // LANES)
        paged = (step.positions, step.sequence, step.tables, step.table_width)
        where = self._card.located(cache)
        self._card.launch(program, "append", [work], *where, across, heads, spec.kv_heads, step.tokens, *paged)


def _attending(spec: AttentionSpec, cache: KvArray, rows_each: int) -> Program:
    """Return the program that attends with the heads of `spec` over a cache of this format.

    A work-group computes `rows_each` query rows.
    """
    constants = (f"KV_{kv_format(spec, cache).upper()}", f"HEAD_DIM={spec.head_dim}", f"ROWS={rows_each}")
    return Program(("kv", "attention"), constants)


def _uploaded(card: OpenClCard, vector: F32 | None) -> Any:
    return None if vector is None else card.upload(vector)

"""What a card's kernels refuse before they launch: a kernel that reads beyond its memory ends the process."""

import numpy as np

from tpi.devices.arena import Arena
from tpi.devices.cuda.attention import Pages, kv_format
from tpi.devices.cuda.backend import Tensor
from tpi.devices.cuda.tensors import TensorNames
from tpi.errors import KernelError
from tpi.kernels.arithmetic import check_data, check_range
from tpi.kernels.spec import F32, I32, PAGE_TOKENS, U8, AttentionSpec, Batch, KvArray, Projected
from tpi.pack.layout import RunLayout, is_quantised


class CardMemory:
    """Arrays of a card's arena as tensors, once they are what a kernel takes them for."""

    def __init__(self, memory: Arena, names: TensorNames) -> None:
        self._memory = memory
        self._names = names

    def bytes(self, what: str, array: KvArray) -> Tensor:
        """A contiguous array that lies here; `what` names it where it does not."""
        self._memory.check(what, array)
        return self._names.tensor(array)

    def weights(self, run: RunLayout, data: U8) -> Tensor:
        """All units of a run."""
        check_data(data, run.units * run.unit_bytes)
        check_aligned(run, data.ctypes.data)
        return self.bytes("weights", data)

    def runs(self, spec: AttentionSpec, data: U8) -> tuple[Tensor, Tensor]:
        """The query units and the KV units."""
        split = spec.query.units * spec.query.unit_bytes
        check_data(data, split + spec.kv.units * spec.kv.unit_bytes)
        return self.weights(spec.query, data[:split]), self.weights(spec.kv, data[split:])

    def pages(self, spec: AttentionSpec, keys: KvArray, values: KvArray, batch: Batch) -> Pages:
        """Keys and values that have every page of `batch`."""
        format = check_cache(spec, keys, values)
        check_batch(batch, len(keys))
        return Pages(format, self.bytes("the caches", keys), self.bytes("the caches", values))


def check_aligned(run: RunLayout, address: int) -> None:
    """Floats stand at multiples of their size, scales at even addresses."""
    for part in run.parts:
        size = 4 if part.format == "f32" else 2
        stride = run.unit_bytes if run.layout == "tiled" else run.record_bytes
        if (address | run.part_offset(part.name) | stride) % size:
            what = "scales" if is_quantised(part.format) else part.format
            raise KernelError(f"weights of {part.name} are not aligned to {size} bytes, as {what} must be")


def check_positions(positions: I32, tokens: int) -> None:
    """One position, int32 and not negative, for each token."""
    if positions.dtype != np.int32 or positions.shape != (tokens,):
        raise KernelError(f"positions must be int32 [{tokens}], not {positions.dtype} of shape {positions.shape}")
    check_range("position", positions, 1 << 31)


def check_batch(batch: Batch, pages: int) -> None:
    """Every token has a sequence, and every page up to its own is one of `pages`."""
    tokens = len(batch.positions)
    check_positions(batch.positions, tokens)
    if batch.sequence.dtype != np.int32 or batch.sequence.shape != (tokens,):
        raise KernelError(f"sequences must be int32 [{tokens}], not {batch.sequence.dtype} {batch.sequence.shape}")
    if batch.tables.dtype != np.int32 or batch.tables.ndim != 2:
        raise KernelError(f"tables must be int32 [sequences, pages], not {batch.tables.dtype} {batch.tables.shape}")
    check_range("sequence", batch.sequence, len(batch.tables))
    last = batch.positions // PAGE_TOKENS
    check_range("place in a table", last, batch.tables.shape[1])
    read = np.full(len(batch.tables), -1, np.int32)
    np.maximum.at(read, batch.sequence, last)
    check_range("page", batch.tables[np.arange(batch.tables.shape[1]) <= read[:, None]], pages)


def check_cache(spec: AttentionSpec, keys: KvArray, values: KvArray) -> str:
    """Pages of this node's KV heads, both in one format: its name."""
    for cache in (keys, values):
        if cache.ndim != 4 or cache.shape[1:3] != (spec.kv_heads, PAGE_TOKENS) or not cache.flags.c_contiguous:
            raise KernelError(f"a cache of {spec.kv_heads} KV heads cannot have the shape {cache.shape}")
    if keys.shape != values.shape or keys.dtype != values.dtype:
        raise KernelError("keys and values must be stored alike")
    return kv_format(keys, spec.head_dim)


def check_heads(spec: AttentionSpec, projected: Projected, tokens: int) -> None:
    """Contiguous float32 heads of every token."""
    for heads, count in (
        (projected.queries, spec.heads), (projected.keys, spec.kv_heads), (projected.values, spec.kv_heads),
    ):  # fmt: skip
        check_floats(heads, (tokens, count, spec.head_dim))


def check_floats(array: F32, shape: tuple[int, ...]) -> None:
    """Contiguous float32 of this shape."""
    if array.dtype != np.float32 or array.shape != shape or not array.flags.c_contiguous:
        raise KernelError(f"heads must be contiguous float32 {list(shape)}, not {array.dtype} of shape {array.shape}")


def check_active(run: RunLayout, active: I32) -> None:
    """int32 numbers of neurons of a pack in records."""
    if run.layout != "record":
        raise KernelError("a list of active neurons needs a pack in the record layout; this one is tiled")
    _check_numbers("active neuron", active, run)


def check_rows(run: RunLayout, rows: I32) -> None:
    """int32 numbers of rows of a table."""
    _check_numbers("row", rows, run)


def _check_numbers(what: str, numbers: I32, run: RunLayout) -> None:
    if numbers.dtype != np.int32 or numbers.ndim != 1:
        raise KernelError(f"numbers of each {what} must be int32 in one dimension, not {numbers.dtype}")
    check_range(what, numbers, run.units * run.width)

"""What arrays must be before a kernel of the device may see them: it would not notice."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.errors import KernelError
from tpi.kernels.arithmetic import check_range
from tpi.kernels.spec import I32, PAGE_TOKENS, AttentionSpec, Batch, KvArray
from tpi.kv import KvDtype, vector_bytes
from tpi.pack.layout import RunLayout

_FLOATS: dict[np.dtype[Any], KvDtype] = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16"}


def kv_format(spec: AttentionSpec, cache: KvArray) -> KvDtype:
    """The format of a cache: what its elements say, or for bytes how many a vector has.

    Raises:
        KernelError: if it is none that these kernels know.
    """
    format: KvDtype = _FLOATS.get(cache.dtype, "q8")
    bytes_each = cache.shape[-1] * cache.itemsize
    if bytes_each != vector_bytes(spec.head_dim, format) or cache.dtype not in (*_FLOATS, np.dtype(np.uint8)):
        raise KernelError(f"{bytes_each} bytes of {cache.dtype} are no vector of {spec.head_dim} keys or values")
    return format


def check_caches(spec: AttentionSpec, keys: KvArray, values: KvArray) -> None:
    """KernelError unless both are a layer of `tpi.kv.KvPages` for this many heads of this size, in one format."""
    for cache in (keys, values):
        if cache.ndim != 4 or cache.shape[1:3] != (spec.kv_heads, PAGE_TOKENS) or not cache.flags.c_contiguous:
            raise KernelError(f"a cache of {spec.kv_heads} KV heads cannot have the shape {cache.shape}")
        kv_format(spec, cache)
    if keys.shape != values.shape or keys.dtype != values.dtype:
        raise KernelError("keys and values must be stored alike")


def check_batch(batch: Batch, pages: int) -> None:
    """KernelError unless every token stands in a sequence, all of whose pages so far are below `pages`."""
    tokens = len(batch.positions)
    for name, array in (("positions", batch.positions), ("sequence", batch.sequence)):
        check_heads(name, array, np.int32, (tokens,))
    check_heads("tables", batch.tables, np.int32, batch.tables.shape)
    if batch.tables.ndim != 2:
        raise KernelError(f"tables must be [sequences, blocks], not of shape {batch.tables.shape}")
    check_range("sequence", batch.sequence, len(batch.tables))
    check_range("position", batch.positions, batch.tables.shape[1] * PAGE_TOKENS)
    for row in np.unique(batch.sequence):
        last = int(batch.positions[batch.sequence == row].max())
        check_range("page", batch.tables[row, : last // PAGE_TOKENS + 1], pages)


def check_heads(what: str, array: npt.NDArray[Any], dtype: npt.DTypeLike, shape: tuple[int, ...]) -> None:
    """KernelError unless an array is contiguous and of this type and shape."""
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise KernelError(f"{what} must be contiguous {np.dtype(dtype)} {shape}, not {array.dtype} {array.shape}")


def check_active(run: RunLayout, active: I32 | None) -> None:
    """KernelError unless a list of active neurons is of those that a run in records has."""
    if active is None:
        return
    if run.layout != "record":
        raise KernelError("a list of active neurons needs a pack in the record layout; this one is tiled")
    if active.dtype != np.int32 or active.ndim != 1 or not active.flags.c_contiguous:
        raise KernelError(f"active neurons must be contiguous int32, not {active.dtype} of shape {active.shape}")
    check_range("active neuron", active, run.units * run.width)

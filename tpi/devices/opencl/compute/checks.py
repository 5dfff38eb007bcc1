"""What arrays must be before a kernel of the device may see them: it would not notice."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.errors import KernelError
from tpi.kernels.arithmetic import check_range
from tpi.kernels.spec import I32, PAGE_TOKENS, AttentionSpec, Batch, KvArray
from tpi.kv import KvDtype, vector_bytes
from tpi.pack.layout import RunLayout

_KV_DTYPES: dict[np.dtype[Any], KvDtype] = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16"}


def check_cache(spec: AttentionSpec, cache: KvArray) -> None:
    """KernelError unless a cache is a layer of `tpi.kv.KvPages` for this many heads of this size."""
    width = vector_bytes(spec.head_dim, _KV_DTYPES.get(cache.dtype, "q8")) // cache.itemsize
    shape = (spec.kv_heads, PAGE_TOKENS, width)
    known = cache.dtype == np.uint8 or cache.dtype in _KV_DTYPES
    if not known or cache.shape[1:] != shape or not cache.flags.c_contiguous:
        raise KernelError(f"a cache must be contiguous [pages, {shape}], not {cache.dtype} of shape {cache.shape}")


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

"""Checks of arrays before a device's kernel reads them: a kernel does not notice when it reads beyond its memory."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.errors import KernelError
from tpi.kernels.arithmetic import check_range
from tpi.kernels.kv import KvDtype, kv_dtype_of, vector_bytes
from tpi.kernels.spec import I32, PAGE_TOKENS, AttentionSpec, Batch, KvArray, Projected
from tpi.pack.layout import RunLayout


def check_array(what: str, array: npt.NDArray[Any], dtype: npt.DTypeLike, shape: tuple[int, ...]) -> None:
    """Raise KernelError, which names the array `what`, unless it is contiguous and has this dtype and shape."""
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise KernelError(f"{what} must be contiguous {np.dtype(dtype)} {shape}, not {array.dtype} {array.shape}")


def kv_format(spec: AttentionSpec, cache: KvArray) -> KvDtype:
    """Return the storage format of a KV cache.

    Raises:
        KernelError: if no cache format has the array's dtype, or the cache's vectors do not fit the heads of `spec`.
    """
    format, bytes_each = kv_dtype_of(cache), cache.shape[-1] * cache.itemsize
    if format is None or bytes_each != vector_bytes(spec.head_dim, format):
        raise KernelError(f"{bytes_each} bytes of {cache.dtype} are not a vector of {spec.head_dim} keys or values")
    return format


def check_caches(spec: AttentionSpec, keys: KvArray, values: KvArray) -> KvDtype:
    """Return the format of a layer of `tpi.kernels.kv.KvPages`; raise KernelError if it does not fit `spec`."""
    for cache in (keys, values):
        if cache.ndim != 4 or cache.shape[1:3] != (spec.kv_heads, PAGE_TOKENS) or not cache.flags.c_contiguous:
            raise KernelError(f"a cache of {spec.kv_heads} KV heads cannot have the shape {cache.shape}")
        format = kv_format(spec, cache)
    if keys.shape != values.shape or keys.dtype != values.dtype:
        raise KernelError("keys and values must have the same shape and dtype")
    return format


def check_positions(positions: I32, tokens: int) -> None:
    """Raise KernelError unless each token has a position that is not negative."""
    check_array("positions", positions, np.int32, (tokens,))
    check_range("position", positions, 1 << 31)


def check_batch(batch: Batch, pages: int) -> None:
    """Raise KernelError unless each token has a sequence whose pages, up to the token's, are all below `pages`."""
    tokens = len(batch.positions)
    check_positions(batch.positions, tokens)
    check_array("sequence", batch.sequence, np.int32, (tokens,))
    check_array("tables", batch.tables, np.int32, batch.tables.shape)
    if batch.tables.ndim != 2:
        raise KernelError(f"tables must be [sequences, pages], not of shape {batch.tables.shape}")
    check_range("sequence", batch.sequence, len(batch.tables))
    check_range("position", batch.positions, batch.tables.shape[1] * PAGE_TOKENS)
    read = np.full(len(batch.tables), -1, np.int32)
    np.maximum.at(read, batch.sequence, batch.positions // PAGE_TOKENS)
    check_range("page", batch.tables[np.arange(batch.tables.shape[1]) <= read[:, None]], pages)


def check_heads(spec: AttentionSpec, projected: Projected, tokens: int) -> None:
    """Raise KernelError unless `projected` has all heads of `spec` for `tokens` tokens."""
    check_array("queries", projected.queries, np.float32, (tokens, spec.heads, spec.head_dim))
    for name, heads in (("keys", projected.keys), ("values", projected.values)):
        check_array(name, heads, np.float32, (tokens, spec.kv_heads, spec.head_dim))


def check_active(run: RunLayout, active: I32 | None) -> None:
    """Raise KernelError unless `active` is None, or lists neurons of a run in the record layout."""
    if active is None:
        return
    if run.layout != "record":
        raise KernelError("a list of active neurons needs a pack in the record layout; this one is tiled")
    _check_numbers("active neuron", active, run)


def check_rows(run: RunLayout, rows: I32) -> None:
    """Raise KernelError unless `rows` are row numbers of a table."""
    _check_numbers("row", rows, run)


def _check_numbers(what: str, numbers: I32, run: RunLayout) -> None:
    check_array(f"numbers of each {what}", numbers, np.int32, (numbers.size,))
    check_range(what, numbers, run.units * run.width)

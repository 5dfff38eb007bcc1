"""The formats of keys and values in pages, `[pages, kv_heads, 32 tokens, vector]`; no other Triton code knows them.

FORMAT is a `tpi.kernels.kv.KvDtype`; `tpi.kernels.kv.KvPages` says how each stores a vector.
"""

import triton
import triton.language as tl

from tpi.devices.cuda.programs.norms import nearest


@triton.jit
def load_vectors(cache, begin, at, mask, head_dim, FORMAT: tl.constexpr):
    """Return float32 values `at` of the vectors that begin `begin` elements into the cache.

    `begin`, `at` and `mask` are broadcast against each other.
    """
    if FORMAT == "q8":
        codes = tl.load(cache + (begin + at), mask=mask, other=0)
        place = (cache + (begin + head_dim + at // 32 * 2)).to(tl.pointer_type(tl.float16))
        return codes.to(tl.float32) * tl.load(place, mask=mask, other=0.0).to(tl.float32)
    elif FORMAT == "q4":
        both = tl.load(cache + (begin + at // 16 * 8 + at % 8), mask=mask, other=0).to(tl.int32)
        codes = ((both >> (at & 8) // 2) & 15).to(tl.float32)
        place = (cache + (begin + (head_dim + 15) // 16 * 8 + at // 32 * 4)).to(tl.pointer_type(tl.float16))
        scale = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        return codes * scale + tl.load(place + 1, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.load(cache + (begin + at), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_q4(cache, begin, values, at, head_dim):
    """Store one vector in q4; the parameters are those of `store_vector`."""
    inside, groups = at < head_dim, tl.arange(0, values.shape[0])
    known = groups * 32 < head_dim
    least = tl.where(known, tl.min(tl.where(inside, values, float("inf")), axis=1), 0.0)
    most = tl.where(known, tl.max(tl.where(inside, values, float("-inf")), axis=1), 0.0)
    scale, low = ((most - least) / 15.0).to(tl.float16), least.to(tl.float16)
    wide = scale.to(tl.float32)[:, None]
    inverse = tl.where(wide > 0, 1.0 / tl.where(wide > 0, wide, 1.0), 0.0)
    codes = nearest((values - low.to(tl.float32)[:, None]) * inverse)
    codes = tl.where(inside, tl.minimum(tl.maximum(codes, 0.0), 15.0), 0.0).to(tl.int32)
    halves = tl.reshape(
        codes << (at & 8) // 2, (values.shape[0] * 2, 2, 8)
    )  # two codes that share a byte share no bits
    runs, byte = tl.arange(0, values.shape[0] * 2)[:, None], tl.arange(0, 8)[None, :]
    tl.store(cache + (begin + runs * 8 + byte), tl.sum(halves, axis=1).to(tl.uint8), mask=runs * 16 < head_dim)
    place = (cache + (begin + (head_dim + 15) // 16 * 8 + groups * 4)).to(tl.pointer_type(tl.float16))
    tl.store(place, scale, mask=known)
    tl.store(place + 1, low, mask=known)


@triton.jit
def store_vector(cache, begin, values, at, head_dim, FORMAT: tl.constexpr):
    """Store one vector at `begin`: `values` and their indices `at` are `[groups, 32]`."""
    inside = at < head_dim
    if FORMAT == "q8":
        scale = (tl.max(tl.abs(values), axis=1) / 127.0).to(tl.float16)
        wide = scale.to(tl.float32)[:, None]
        codes = nearest(values * tl.where(wide > 0, 1.0 / tl.where(wide > 0, wide, 1.0), 0.0))
        codes = tl.minimum(tl.maximum(codes, -127.0), 127.0).to(tl.int8)
        tl.store(cache + (begin + at), codes, mask=inside)
        groups = tl.arange(0, values.shape[0])
        place = (cache + (begin + head_dim + groups * 2)).to(tl.pointer_type(tl.float16))
        tl.store(place, scale, mask=groups * 32 < head_dim)
    elif FORMAT == "q4":
        store_q4(cache, begin, values, at, head_dim)
    else:
        tl.store(cache + (begin + at), values.to(cache.dtype.element_ty), mask=inside)


@triton.jit
def spread(heads, out, head_dim, GROUPS: tl.constexpr):
    """Apply the Hadamard rotation (`tpi.kernels.paged.hadamard_rotate`) to one head of `head_dim` values per program.

    GROUPS * 32 is at least `head_dim`.
    """
    begin, group, one = tl.program_id(0).to(tl.int64) * head_dim, tl.arange(0, GROUPS), tl.arange(0, 32)
    at = group[:, None] * 32 + one[None, :]
    values = tl.load(heads + begin + at, mask=at < head_dim, other=0.0)
    common = one[:, None] & one[None, :]  # signs: the parity of the bits that two indices share
    common = common ^ common >> 4
    common = common ^ common >> 2
    signs = 1.0 - 2.0 * ((common ^ common >> 1) & 1).to(tl.float32)
    turned = tl.sum(values[:, None, :] * signs[None, :, :], axis=2) * 0.17677669529663689
    whole = (group * 32 + 32 <= head_dim)[:, None]
    tl.store(out + begin + at, tl.where(whole, turned, values), mask=at < head_dim)


@triton.jit
def append(
    cache, heads, positions, sequence, tables, head_dim, vector, longest,
    FORMAT: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Store one head of one token per program.

    `heads` is `[tokens, kv_heads, head_dim]`; each head goes to its token's place in the cache. `vector` is the number
    of elements from one vector to the next, `longest` the pages in a row of `tables`. GROUPS * 32 is at least
    `head_dim`.
    """
    token, head, count = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    position = tl.load(positions + token)
    page = tl.load(tables + tl.load(sequence + token) * longest + position // 32).to(tl.int64)
    at = tl.arange(0, GROUPS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    begin = (token.to(tl.int64) * count + head) * head_dim
    values = tl.load(heads + begin + at, mask=at < head_dim, other=0.0)
    store_vector(cache, ((page * count + head) * 32 + position % 32) * vector, values, at, head_dim, FORMAT)

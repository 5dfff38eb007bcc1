"""The formats of keys and values in pages, `[pages, kv_heads, 32 tokens, vector]`; no other Triton code knows them.

FORMAT is a `tpi.kernels.kv.KvDtype`; `tpi.kernels.kv.KvPages` says how each stores a vector. A vector is given by
`begin` and `token`. For values, `begin` is the vector's first element in the cache, and `token` is 0. For keys, which
lie transposed, `begin` is the first element of its page and head, and `token` its number in the page.
"""

import triton
import triton.language as tl

from tpi.devices.cuda.programs.norms import nearest


@triton.jit
def element(at, token, UNIT: tl.constexpr, KEYS: tl.constexpr):
    """Return the offset of element `at` of a vector from the vector's start or, with KEYS, from its page's start.

    With KEYS, the vectors of a page are stored in turns of UNIT elements, and `token` is the vector's number in it.
    """
    if KEYS:
        return at // UNIT * (UNIT * 32) + token * UNIT + at % UNIT
    else:
        return at


@triton.jit
def factor(cache, begin, codes, number, token, KEYS: tl.constexpr):
    """Return pointers to the float16 factors `number` of vectors with `codes` bytes of codes."""
    if KEYS:
        place = begin + codes * 32 + number * 64 + token * 2
    else:
        place = begin + codes + number * 2
    return (cache + place).to(tl.pointer_type(tl.float16))


@triton.jit
def load_vectors(cache, begin, token, at, mask, head_dim, FORMAT: tl.constexpr, KEYS: tl.constexpr):
    """Return float32 values `at` of vectors.

    `begin`, `token`, `at` and `mask` are broadcast against each other.
    """
    if FORMAT == "q8":
        codes = tl.load(cache + (begin + element(at, token, 4, KEYS)), mask=mask, other=0)
        place = factor(cache, begin, (head_dim + 3) // 4 * 4, at // 32, token, KEYS)
        return codes.to(tl.float32) * tl.load(place, mask=mask, other=0.0).to(tl.float32)
    elif FORMAT == "q4":
        byte = element(at // 16 * 8 + at % 8, token, 4, KEYS)
        both = tl.load(cache + (begin + byte), mask=mask, other=0).to(tl.int32)
        codes, size = ((both >> (at & 8) // 2) & 15).to(tl.float32), (head_dim + 15) // 16 * 8
        scale = tl.load(factor(cache, begin, size, at // 32 * 2, token, KEYS), mask=mask, other=0.0)
        least = tl.load(factor(cache, begin, size, at // 32 * 2 + 1, token, KEYS), mask=mask, other=0.0)
        return codes * scale.to(tl.float32) + least.to(tl.float32)
    else:
        return tl.load(cache + (begin + element(at, token, 1, KEYS)), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_q4(cache, begin, token, values, at, head_dim, KEYS: tl.constexpr):
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
    place = begin + element(runs * 8 + byte, token, 4, KEYS)
    tl.store(cache + place, tl.sum(halves, axis=1).to(tl.uint8), mask=runs * 16 < head_dim)
    size = (head_dim + 15) // 16 * 8
    tl.store(factor(cache, begin, size, groups * 2, token, KEYS), scale, mask=known)
    tl.store(factor(cache, begin, size, groups * 2 + 1, token, KEYS), low, mask=known)


@triton.jit
def store_vector(cache, begin, token, values, at, head_dim, FORMAT: tl.constexpr, KEYS: tl.constexpr):
    """Store one vector: `values` and their indices `at` are `[groups, 32]`."""
    inside = at < head_dim
    if FORMAT == "q8":
        scale = (tl.max(tl.abs(values), axis=1) / 127.0).to(tl.float16)
        wide = scale.to(tl.float32)[:, None]
        codes = nearest(values * tl.where(wide > 0, 1.0 / tl.where(wide > 0, wide, 1.0), 0.0))
        codes = tl.minimum(tl.maximum(codes, -127.0), 127.0).to(tl.int8)
        size = (head_dim + 3) // 4 * 4
        codes = tl.where(inside, codes, 0)
        tl.store(cache + (begin + element(at, token, 4, KEYS)), codes, mask=at < size)
        groups = tl.arange(0, values.shape[0])
        tl.store(factor(cache, begin, size, groups, token, KEYS), scale, mask=groups * 32 < head_dim)
    elif FORMAT == "q4":
        store_q4(cache, begin, token, values, at, head_dim, KEYS)
    else:
        place = begin + element(at, token, 1, KEYS)
        tl.store(cache + place, values.to(cache.dtype.element_ty), mask=inside)


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
    FORMAT: tl.constexpr, KEYS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Store one head of one token per program: its key if KEYS, else its value.

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
    own, token = (page * count + head) * 32, position % 32
    if KEYS:
        store_vector(cache, own * vector, token, values, at, head_dim, FORMAT, KEYS)
    else:
        store_vector(cache, (own + token) * vector, 0, values, at, head_dim, FORMAT, KEYS)

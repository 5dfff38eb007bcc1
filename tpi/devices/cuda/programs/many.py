"""Programs that multiply many tokens (a prompt) by packed weights.

Each computes a tile of tokens x outputs on the tensor cores, 32 inputs at a time.
"""

import triton
import triton.language as tl

from tpi.devices.cuda.programs.weights import code_step, factor, first_byte, first_code, group_step, nibble, weights_at


@triton.jit
def code_products(x, w, INT8: tl.constexpr):
    """Multiply int8 codes exactly; return float32.

    Without INT8 they are multiplied as float16: it represents every code, and a sum of 32 products is below 2^24.
    """
    if INT8:
        return tl.dot(x, w).to(tl.float32)
    else:
        return tl.dot(x.to(tl.float16), w.to(tl.float16), out_dtype=tl.float32)


@triton.jit
def many_grouped(
    data, codes, rest, scales, index, out, tokens, outputs, groups, offset, unit, tall, deep,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, FORMAT: tl.constexpr, BYTES: tl.constexpr,
    CODES: tl.constexpr, TILED: tl.constexpr, INDEXED: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Compute the product of `few_grouped` for many tokens.

    Codes of a group are multiplied exactly, then scaled. With INT8, tensor cores multiply them (`code_products`).
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    place = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.load(index + place, mask=place < outputs, other=0) if INDEXED else place
    held, known, within = token < tokens, place < outputs, tl.arange(0, 32)
    first = first_byte(row, offset, unit, tall, deep, BYTES, TILED)
    code = first + first_code(row, BYTES, CODES, TILED)
    from_token = token.to(tl.int64) * (groups * 32)
    total = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for group in range(groups):
        at = from_token[:, None] + (group * 32 + within)[None, :]
        x = tl.load(codes + at, mask=held[:, None], other=0)
        unit_of = tl.load(scales + token.to(tl.int64) * groups + group, mask=held, other=0.0)
        if FORMAT != "q8" and FORMAT != "q4" and FORMAT != "q4s":
            w = weights_at(
                data, row[None, :], tl.full([1, 1], group, tl.int32), within[:, None], known[None, :], groups * 32,
                offset, unit, tall, deep, FORMAT, BYTES, CODES, TILED,
            )  # fmt: skip
            total += tl.dot(x.to(tl.float32), w, input_precision="ieee") * unit_of[:, None]
        else:
            step = group_step(tl.full([1], group, tl.int32), unit, deep, BYTES, TILED)
            bytes_at = (code + step)[None, :] + code_step(within % CODES, TILED)[:, None]
            bits = tl.load(data + bytes_at, mask=known[None, :], other=0)
            scale = factor(data, first + step, row, 0, known, CODES, TILED)
            if FORMAT == "q8":
                w = bits.to(tl.int8, bitcast=True)
                more = tl.load(rest + at, mask=held[:, None], other=0)
                dots = code_products(x, w, INT8) + code_products(more, w, INT8) * 0.0078125  # 1/128
                total += dots * unit_of[:, None] * scale[None, :]
            else:
                dots = code_products(x, nibble(bits, (within // 16)[:, None]), INT8)
                if FORMAT == "q4":
                    low = factor(data, first + step, row, 1, known, CODES, TILED)
                else:
                    low = scale * -8.0
                sums = tl.sum(x.to(tl.int32), axis=1).to(tl.float32)
                total += (dots * scale[None, :] + sums[:, None] * low[None, :]) * unit_of[:, None]
    kept = held[:, None] & known[None, :]
    tl.store(out + token.to(tl.int64)[:, None] * outputs + place[None, :], total, mask=kept)


@triton.jit
def many_plain(
    data, x, index, out, tokens, inputs, outputs, length, offset, unit,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, FORMAT: tl.constexpr, BYTES: tl.constexpr, CODES: tl.constexpr,
    COLUMNS: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Multiply `x`, `[tokens, inputs]`, by a matrix; write the product to `out`, `[tokens, outputs]`, in float32.

    The matrix is stored as records. Each record has one vector of `length` values, of an input (COLUMNS) or of an
    output. If INDEXED, only the vectors that `index` lists are used.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    place = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    held, wanted = token < tokens, place < outputs
    total = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for begun in range(0, inputs, 32):
        entry = begun + tl.arange(0, 32)
        if COLUMNS:
            vector = tl.load(index + entry, mask=entry < inputs, other=0) if INDEXED else entry
            known = (entry < inputs)[:, None] & wanted[None, :]
            w = weights_at(
                data, vector[:, None], (place // 32)[None, :], (place % 32)[None, :], known, length,
                offset, unit, 1, 1, FORMAT, BYTES, CODES, False,
            )  # fmt: skip
        else:
            row = tl.load(index + place, mask=wanted, other=0) if INDEXED else place
            w = weights_at(
                data, row[None, :], (entry // 32)[:, None], (entry % 32)[:, None],
                wanted[None, :] & (entry < inputs)[:, None], length, offset, unit, 1, 1, FORMAT, BYTES, CODES, False,
            )  # fmt: skip
        at = token.to(tl.int64)[:, None] * inputs + entry[None, :]
        values = tl.load(x + at, mask=held[:, None] & (entry < inputs)[None, :], other=0.0)
        total = tl.dot(values, w, total, input_precision="ieee")
    at = token.to(tl.int64)[:, None] * outputs + place[None, :]
    tl.store(out + at, total, mask=held[:, None] & wanted[None, :])


@triton.jit
def decode(
    data, index, out, vectors, groups, length, offset, unit, tall, deep, to_vector, to_value,
    VECTORS: tl.constexpr, FORMAT: tl.constexpr, BYTES: tl.constexpr, CODES: tl.constexpr, TILED: tl.constexpr,
    INDEXED: tl.constexpr,
):  # fmt: skip
    """Decode weights to float32: value v of vector n goes to `out[n * to_vector + v * to_value]`.

    Each program decodes 4 groups.
    """
    place = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    group, within = tl.program_id(1) * 4 + tl.arange(0, 4), tl.arange(0, 32)
    vector = tl.load(index + place, mask=place < vectors, other=0) if INDEXED else place
    known = (place[:, None] < vectors) & (group[None, :] < groups)
    w = weights_at(
        data, vector[:, None, None], group[None, :, None], within[None, None, :], known[:, :, None], length,
        offset, unit, tall, deep, FORMAT, BYTES, CODES, TILED,
    )  # fmt: skip
    value = group[None, :, None] * 32 + within[None, None, :]
    at = place.to(tl.int64)[:, None, None] * to_vector + value.to(tl.int64) * to_value
    tl.store(out + at, w, mask=known[:, :, None] & (value < length))

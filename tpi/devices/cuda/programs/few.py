"""Products of few tokens (under 16) with packed weights: a program reads each weight once and uses it for all."""

import triton
import triton.language as tl

from tpi.devices.cuda.programs.weights import code_step, factor, first_byte, first_code, group_step, nibble, weights_at


@triton.jit
def rounded(codes, rest, scales, tokens, groups, at, known, width, FORMAT: tl.constexpr):
    """Return activations that were rounded to int8 as float32, before their scales are applied.

    `tokens`, `groups` and `at` are indices whose shapes are broadcast: value `at` (0..31) of each group, for each
    token.
    """
    place = tokens * width + groups * 32 + at
    x = tl.load(codes + place, mask=known, other=0).to(tl.float32)
    if FORMAT == "q8":
        x += tl.load(rest + place, mask=known, other=0).to(tl.float32) * 0.0078125  # 1/128
    return x


@triton.jit
def few_grouped(
    data, codes, rest, scales, index, out, tokens, outputs, groups, offset, unit, tall, deep,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr, BYTES: tl.constexpr,
    CODES: tl.constexpr, TILED: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Set `out`, `[tokens, outputs]`, to activations (`codes` + `rest` / 128) * `scales` times quantised weights.

    Outputs are those that `index` lists if INDEXED. Sums of codes are computed group by group, then scaled.
    """
    place = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.load(index + place, mask=place < outputs, other=0) if INDEXED else place
    token = tl.arange(0, TOKENS)
    first = first_byte(row, offset, unit, tall, deep, BYTES, TILED)
    total = tl.zeros([TOKENS, OUTPUTS, GROUPS], tl.float32)
    for begun in range(0, groups, GROUPS):
        group = begun + tl.arange(0, GROUPS)
        known = (place[:, None] < outputs) & (group[None, :] < groups)
        held = (token[:, None] < tokens) & (group[None, :] < groups)
        unit_of = tl.load(scales + token[:, None] * groups + group[None, :], mask=held, other=0.0)[:, None, :]
        if FORMAT != "q8" and FORMAT != "q4" and FORMAT != "q4s":
            within = tl.arange(0, 32)
            w = weights_at(
                data, row[:, None, None], group[None, :, None], within[None, None, :], known[:, :, None], groups * 32,
                offset, unit, tall, deep, FORMAT, BYTES, CODES, TILED,
            )  # fmt: skip
            x = rounded(
                codes, rest, scales, token[:, None, None], group[None, :, None], within[None, None, :],
                held[:, :, None], groups * 32, FORMAT,
            )  # fmt: skip
            total += tl.sum(w[None] * x[:, None], axis=3) * unit_of
        else:
            byte = tl.arange(0, CODES)
            begin = first[:, None] + group_step(group, unit, deep, BYTES, TILED)[None, :]
            at = begin + first_code(row, BYTES, CODES, TILED)[:, None]
            bits = tl.load(
                data + (at[:, :, None] + code_step(byte, TILED)[None, None, :]), mask=known[:, :, None], other=0
            )
            scale = factor(data, begin, row[:, None], 0, known, CODES, TILED)
            x = rounded(
                codes, rest, scales, token[:, None, None], group[None, :, None], byte[None, None, :], held[:, :, None],
                groups * 32, FORMAT,
            )  # fmt: skip
            if FORMAT == "q8":
                w = bits.to(tl.int8, bitcast=True).to(tl.float32)
                total += tl.sum(w[None] * x[:, None], axis=3) * scale[None] * unit_of
            else:
                high = rounded(
                    codes, rest, scales, token[:, None, None], group[None, :, None], byte[None, None, :] + 16,
                    held[:, :, None], groups * 32, FORMAT,
                )  # fmt: skip
                w, w_high = nibble(bits, 0).to(tl.float32), nibble(bits, 1).to(tl.float32)
                dots = tl.sum(w[None] * x[:, None] + w_high[None] * high[:, None], axis=3)
                if FORMAT == "q4":
                    low = factor(data, begin, row[:, None], 1, known, CODES, TILED)
                else:
                    low = scale * -8.0
                total += (dots * scale[None] + tl.sum(x + high, axis=2)[:, None, :] * low[None]) * unit_of
    kept = (token[:, None] < tokens) & (place[None, :] < outputs)
    tl.store(out + token[:, None] * outputs + place[None, :], tl.sum(total, axis=2), mask=kept)


@triton.jit
def few_words(
    data, codes, rest, scales, index, out, tokens, outputs, groups, offset, unit, tall, deep,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr, BYTES: tl.constexpr,
    CODES: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Do what `few_grouped` does, for q8, q4 and q4s in the tiled layout: read four codes of an output at once.

    The words of a square lie one after the other, so that the threads of a warp read neighbouring words.
    """
    place = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.load(index + place, mask=place < outputs, other=0) if INDEXED else place
    token, word = tl.arange(0, TOKENS), tl.arange(0, 4)
    first = first_byte(row, offset, unit, tall, deep, BYTES, True)
    total = tl.zeros([TOKENS, OUTPUTS, GROUPS, 4], tl.float32)
    for begun in range(0, groups, GROUPS):
        group = begun + tl.arange(0, GROUPS)
        known = (place[:, None] < outputs) & (group[None, :] < groups)
        held = (token[:, None] < tokens) & (group[None, :] < groups)
        begin = first[:, None] + group_step(group, unit, deep, BYTES, True)[None, :]
        at = data + ((begin + (row % 8 * 4)[:, None])[:, :, None] + word[None, None, :] * 32)
        low = tl.load(at.to(tl.pointer_type(tl.int32)), mask=known[:, :, None], other=0)
        high = low
        if FORMAT == "q8":
            high = tl.load((at + 128).to(tl.pointer_type(tl.int32)), mask=known[:, :, None], other=0)
        scale = factor(data, begin, row[:, None], 0, known, CODES, True)
        unit_of = tl.load(scales + token[:, None] * groups + group[None, :], mask=held, other=0.0)[:, None, :]
        place_x = token[:, None, None] * (groups * 8) + group[None, :, None] * 8 + word[None, None, :]
        x_low, x_high = words_at(codes, place_x, held), words_at(codes, place_x + 4, held)
        dots = tl.zeros([TOKENS, OUTPUTS, GROUPS, 4], tl.int32)
        for byte in tl.static_range(4):
            if FORMAT == "q8":
                w, w_high = signed_byte(low, byte), signed_byte(high, byte)
            else:
                w, w_high = (low >> (byte * 8)) & 15, (low >> (byte * 8 + 4)) & 15
            dots += w[None] * signed_byte(x_low, byte)[:, None] + w_high[None] * signed_byte(x_high, byte)[:, None]
        part = dots.to(tl.float32)
        if FORMAT == "q8":
            more = tl.zeros([TOKENS, OUTPUTS, GROUPS, 4], tl.int32)
            r_low, r_high = words_at(rest, place_x, held), words_at(rest, place_x + 4, held)
            for byte in tl.static_range(4):
                w, w_high = signed_byte(low, byte), signed_byte(high, byte)
                more += w[None] * signed_byte(r_low, byte)[:, None] + w_high[None] * signed_byte(r_high, byte)[:, None]
            total += (part + more.to(tl.float32) * 0.0078125) * (scale[None] * unit_of)[:, :, :, None]
        else:
            x = tl.zeros([TOKENS, GROUPS, 4], tl.int32)
            for byte in tl.static_range(4):
                x += signed_byte(x_low, byte) + signed_byte(x_high, byte)
            if FORMAT == "q4":
                least = factor(data, begin, row[:, None], 1, known, CODES, True)
            else:
                least = scale * -8.0
            with_least = part * scale[None, :, :, None] + x.to(tl.float32)[:, None] * least[None, :, :, None]
            total += with_least * unit_of[:, :, :, None]
    kept = (token[:, None] < tokens) & (place[None, :] < outputs)
    tl.store(out + token[:, None] * outputs + place[None, :], tl.sum(tl.sum(total, axis=3), axis=2), mask=kept)


@triton.jit
def words_at(codes, place, held):
    """Return words of four int8 activations, `[tokens, groups, 4]` int32; 0 where `held` is False."""
    return tl.load(codes.to(tl.pointer_type(tl.int32)) + place, mask=held[:, :, None], other=0)


@triton.jit
def signed_byte(words, byte: tl.constexpr):
    """Return byte number `byte` (0: the lowest) of each int32 word, as a signed number."""
    return (words << (24 - byte * 8)) >> 24


@triton.jit
def few_rows(
    data, x, index, out, tokens, outputs, groups, length, offset, unit,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Set `out`, `[tokens, outputs]`, to `x`, `[tokens, length]`, times rows of f32 or bf16.

    If INDEXED, only the rows that `index` lists are used.
    """
    place = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.load(index + place, mask=place < outputs, other=0) if INDEXED else place
    token, within = tl.arange(0, TOKENS), tl.arange(0, 32)
    total = tl.zeros([TOKENS, OUTPUTS, GROUPS, 32], tl.float32)
    for begun in range(0, groups, GROUPS):
        group = begun + tl.arange(0, GROUPS)
        known = (place[:, None] < outputs) & (group[None, :] < groups)
        w = weights_at(
            data, row[:, None, None], group[None, :, None], within[None, None, :], known[:, :, None], length,
            offset, unit, 1, 1, FORMAT, 0, 1, False,
        )  # fmt: skip
        inputs = group[None, :, None] * 32 + within[None, None, :]
        held = (token[:, None, None] < tokens) & (inputs < length)
        values = tl.load(x + token[:, None, None] * length + inputs, mask=held, other=0.0)
        total += w[None] * values[:, None]
    kept = (token[:, None] < tokens) & (place[None, :] < outputs)
    sums = tl.sum(tl.sum(total, axis=3), axis=2)
    tl.store(out + token[:, None] * outputs + place[None, :], sums, mask=kept)


@triton.jit
def few_columns(
    data, x, index, out, tokens, vectors, span, groups, length, offset, unit,
    TOKENS: tl.constexpr, VECTORS: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr, BYTES: tl.constexpr,
    CODES: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Multiply `x`, `[tokens, vectors]`, by a matrix that is stored as columns in records; divide the sum into splits.

    A split is the sum over `span` vectors, of those that `index` lists if INDEXED. `out` is `[splits, tokens, length]`;
    the caller adds the splits.
    """
    group, within = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS), tl.arange(0, 32)
    split, token = tl.program_id(1), tl.arange(0, TOKENS)
    end = tl.minimum(split * span + span, vectors)
    total = tl.zeros([TOKENS, VECTORS, GROUPS, 32], tl.float32)
    for begun in range(split * span, end, VECTORS):
        place = begun + tl.arange(0, VECTORS)
        vector = tl.load(index + place, mask=place < end, other=0) if INDEXED else place
        known = (place[:, None] < end) & (group[None, :] < groups)
        w = weights_at(
            data, vector[:, None, None], group[None, :, None], within[None, None, :], known[:, :, None], length,
            offset, unit, 1, 1, FORMAT, BYTES, CODES, False,
        )  # fmt: skip
        held = (token[:, None] < tokens) & (place[None, :] < end)
        values = tl.load(x + token[:, None] * vectors + place[None, :], mask=held, other=0.0)
        total += w[None] * values[:, :, None, None]
    at = group[None, :, None] * 32 + within[None, None, :]
    kept = (token[:, None, None] < tokens) & (at < length)
    begin = (split * tokens + token[:, None, None]).to(tl.int64) * length
    tl.store(out + begin + at, tl.sum(total, axis=1), mask=kept)

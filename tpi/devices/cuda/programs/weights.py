"""Reading of packed weights in both layouts; `tpi.pack.builder.quantise` defines the place of each byte.

A matrix is read by outputs and groups of 32 inputs. A group of an output begins `first` + `step` bytes into the data:
`first` depends on the output alone, `step` on the group alone. In the record layout an "output" is a vector, and `unit`
is the stride between vectors. In the tiled layout `unit` is the bytes of a unit, which has `tall` squares above one
another and `deep` side by side.
"""

import triton
import triton.language as tl


@triton.jit
def first_byte(outputs, offset, unit, tall, deep, BYTES: tl.constexpr, TILED: tl.constexpr):
    """Return the offset (int64) of the first group of `outputs` (int32), or of the square that contains it."""
    if TILED:
        rows = outputs // 8
        return offset + (rows // tall).to(tl.int64) * unit + ((rows % tall) * deep).to(tl.int64) * (8 * BYTES)
    else:
        return offset + outputs.to(tl.int64) * unit


@triton.jit
def group_step(groups, unit, deep, BYTES: tl.constexpr, TILED: tl.constexpr):
    """Return the distance (int64) in bytes of group number `groups` (int32) from an output's first group."""
    if TILED:
        return (groups // deep).to(tl.int64) * unit + (groups % deep) * (8 * BYTES)
    else:
        return groups.to(tl.int64) * BYTES


@triton.jit
def first_code(outputs, BYTES: tl.constexpr, CODES: tl.constexpr, TILED: tl.constexpr):
    """Return the distance in bytes of an output's first code from `first_byte` + `group_step`.

    CODES is the number of bytes of a group's codes.
    """
    if TILED:
        return outputs % 8 * 4
    else:
        return outputs * 0 + (BYTES - CODES)


@triton.jit
def code_step(at, TILED: tl.constexpr):
    """Return the distance in bytes of byte `at` of a group's codes from the first one."""
    if TILED:
        return at // 4 * 32 + at % 4
    else:
        return at


@triton.jit
def factor(data, begin, outputs, number: tl.constexpr, mask, CODES: tl.constexpr, TILED: tl.constexpr):
    """Return the scale (`number` 0) or minimum (1) of the groups at `begin`, as float32."""
    if TILED:
        at = begin + 8 * CODES + outputs % 8 * 2 + 16 * number
    else:
        at = begin + 2 * number
    return tl.load((data + at).to(tl.pointer_type(tl.float16)), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def weights_at(
    data, outputs, groups, within, known, length, offset, unit, tall, deep,
    FORMAT: tl.constexpr, BYTES: tl.constexpr, CODES: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """Return float32 weights of outputs x groups x values within a group (0..31); the three shapes are broadcast.

    Weights are 0 where `known` (outputs x groups) is False, and beyond `length` inputs.
    """
    first = first_byte(outputs, offset, unit, tall, deep, BYTES, TILED)
    if FORMAT == "f32":
        inputs = groups * 32 + within
        at = (data + (first + inputs * 4)).to(tl.pointer_type(tl.float32))
        return tl.load(at, mask=known & (inputs < length), other=0.0)
    elif FORMAT == "bf16":
        inputs = groups * 32 + within
        at = (data + (first + inputs * 2)).to(tl.pointer_type(tl.uint16))
        bits = tl.load(at, mask=known & (inputs < length), other=0)
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        begin = first + group_step(groups, unit, deep, BYTES, TILED)
        code = begin + first_code(outputs, BYTES, CODES, TILED) + code_step(within % CODES, TILED)
        codes = tl.load(data + code, mask=known, other=0)
        scale = factor(data, begin, outputs, 0, known, CODES, TILED)
        if FORMAT == "q8":
            return codes.to(tl.int8, bitcast=True).to(tl.float32) * scale
        else:
            digits = nibble(codes, within // 16)
            if FORMAT == "q4":
                return digits.to(tl.float32) * scale + factor(data, begin, outputs, 1, known, CODES, TILED)
            else:
                return (digits.to(tl.float32) - 8.0) * scale


@triton.jit
def nibble(codes, high):
    """Return the low half of each byte as int8, or the high half where `high` is 1."""
    return ((codes.to(tl.int32) >> (high * 4)) & 15).to(tl.int8)

"""Reading of packed weights in both layouts; `tpi.pack.builder.quantise` defines the place of each byte.

A matrix is read by outputs and groups of 32 inputs. A group of an output begins `first` + `step` bytes into the data:
`first` depends on the output alone, `step` on the group alone. In the record layout an "output" is a vector, and `unit`
is the stride between vectors. In the tiled layout `unit` is the bytes of a unit, which consists of `tall` x `deep`
*squares* of 8 outputs and 32 inputs.
"""

import triton
import triton.language as tl


@triton.jit
def first_byte(outputs, offset, unit, tall, deep, BYTES: tl.constexpr, TILED: tl.constexpr):
    """Return the offset in bytes (int64) of the first group of each of `outputs` (int32).

    In the tiled layout, it is the offset of the square that contains this group.
    """
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
    """Return the scale (`number` 0) or minimum (1) of the groups at `begin`, as float32; 0 where `mask` is False."""
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
    elif FORMAT == "f16":
        inputs = groups * 32 + within
        at = (data + (first + inputs * 2)).to(tl.pointer_type(tl.float16))
        return tl.load(at, mask=known & (inputs < length), other=0.0).to(tl.float32)
    elif CODES != 32 and FORMAT != "q4" and FORMAT != "q4s":  # tiled alone
        begin = first + group_step(groups, unit, deep, BYTES, TILED)
        return planes_at(data, begin, outputs, within, known, FORMAT, CODES)
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
def planes_at(data, begin, outputs, within, known, FORMAT: tl.constexpr, CODES: tl.constexpr):
    """Return float32 weights in the tiled layout, of formats other than q8, q4 and q4s (`tpi.pack.groups`)."""
    if CODES == 24:
        codes = plane_at(data + begin, outputs, within, known, 4) + 16 * plane_at(
            data + begin + 128, outputs, within, known, 2
        )
    elif CODES == 20:
        codes = plane_at(data + begin, outputs, within, known, 4) + 16 * plane_at(
            data + begin + 128, outputs, within, known, 1
        )
    elif CODES == 12:
        codes = plane_at(data + begin, outputs, within, known, 2) + 4 * plane_at(
            data + begin + 64, outputs, within, known, 1
        )
    elif CODES == 8:
        codes = plane_at(data + begin, outputs, within, known, 2)
    else:
        codes = plane_at(data + begin, outputs, within, known, 4)
    values = numbers(codes, FORMAT).to(tl.float32)
    if FORMAT == "mxfp4":
        power = tl.load(data + (begin + 8 * CODES + outputs % 8), mask=known, other=0).to(tl.int32)
        return values * (tl.maximum(power - 1, 1) << 23).to(tl.float32, bitcast=True)
    scale = factor(data, begin, outputs, 0, known, CODES, True)
    if FORMAT == "q5":
        return values * scale + factor(data, begin, outputs, 1, known, CODES, True)
    elif FORMAT == "q2":
        at = begin + 8 * CODES + 32 + outputs % 8 * 2
        each = tl.load(data + at, mask=known, other=0).to(tl.int32) >> (within // 16 * 4) & 15
        offset = tl.load(data + (at + 1), mask=known, other=0).to(tl.int32) >> (within // 16 * 4) & 15
        low = factor(data, begin, outputs, 1, known, CODES, True)
        return values * (scale * each.to(tl.float32)) - low * offset.to(tl.float32)
    elif FORMAT == "q6" or FORMAT == "q3" or FORMAT == "iq2" or FORMAT == "iq1" or FORMAT == "nvfp4":
        at = begin + 8 * CODES + 16 + outputs % 8 * 2 + within // 16
        each = tl.load(data + at, mask=known, other=0).to(tl.int8, bitcast=True)
        if FORMAT == "iq2" or FORMAT == "iq1":
            scale = scale * 0.125
        elif FORMAT == "nvfp4":
            scale = scale * 0.0078125
        return values * (scale * each.to(tl.float32))
    else:
        return values * scale


@triton.jit
def plane_at(plane, outputs, within, known, BITS: tl.constexpr):
    """Return the BITS bits of each code, int32, that the plane at the pointers `plane` holds."""
    word = within // 4
    at = word % BITS * 32 + outputs % 8 * 4 + within % 4
    bits = tl.load(plane + at, mask=known, other=0).to(tl.int32)
    return (bits >> (word // BITS * BITS)) & ((1 << BITS) - 1)


@triton.jit
def numbers(codes, FORMAT: tl.constexpr):
    """Return the numbers, int32, that codes of a format stand for."""
    if FORMAT == "mxfp4" or FORMAT == "nvfp4":
        return byte_of(codes, 866949542568919296, -794609369730842880)
    elif FORMAT == "iq4":
        return byte_of(codes, -654466911485192063, 8167635493787864321)
    elif FORMAT == "iq3s":
        return byte_of(codes, -567373904612367, 1084535218666537729)
    elif FORMAT == "iq3":
        return byte_of(codes, -219290014132679486, 4482256062742006788)
    elif FORMAT == "iq2":
        return byte_of(codes, 47386524706773, 0)
    elif FORMAT == "iq1":
        return byte_of(codes, 9925702973943, 0)
    elif FORMAT == "q6":
        return codes - 32
    elif FORMAT == "q3":
        return codes - 4
    else:
        return codes


@triton.jit
def byte_of(codes, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Return the entry with index `codes` (0..15) of a table of 16 int8 numbers, as int32.

    LOW holds the first 8 entries, HIGH the last 8, one entry per byte, the first in the lowest byte.
    """
    held = tl.where(codes < 8, tl.full(codes.shape, LOW, tl.int64), tl.full(codes.shape, HIGH, tl.int64))
    return (held >> (codes % 8 * 8).to(tl.int64)).to(tl.int8).to(tl.int32)


@triton.jit
def nibble(codes, high):
    """Return the low half of each byte as int8, or the high half where `high` is 1."""
    return ((codes.to(tl.int32) >> (high * 4)) & 15).to(tl.int8)

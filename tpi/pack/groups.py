"""Quantisation groups: conversion between 32 float32 values and the bytes of one quantised block.

A block holds its factors and then its codes. The blocks of q8, q4, q4s, q5, mxfp4 and iq4 have the values of GGUF's
Q8_0, Q4_1, Q4_0, Q5_1, MXFP4 and IQ4_NL. The others are groups of 32 of GGUF's super-blocks (`Coding`).

The bits of codes lie in planes, the low bits first. A plane of b bits takes b words of 4 bytes. Value 4w + j of a group
is in byte j of word w mod b, shifted left by b * (w div b) bits. So a plane of 4 bits has value j in the low half of
byte j, and value j + 16 in the high half.
"""

from dataclasses import dataclass
from itertools import product
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from tpi.config import Format
from tpi.pack.layout import GROUP, GROUP_BYTES

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Coding:
    """How the values of a group are stored.

    Factors are one of:

    - `power`: an e8m0 byte, the scale.
    - `scale`: an f16 scale.
    - `line`: an f16 scale and an f16 minimum.
    - `halves`: an f16 scale and two int8; the scale of each half is their product.
    - `lines`: an f16 scale, an f16 offset, a byte that multiplies the scale and a byte that multiplies the offset. The
      low 4 bits of a byte are for the first half of the group. The minimum is the offset, negated.

    A value is `scale * unit * number + minimum`. The number is the code minus `offset`, or `table[code]`.
    """

    planes: tuple[int, ...]
    factors: Literal["power", "scale", "line", "halves", "lines"]
    offset: int = 0
    table: tuple[int, ...] = ()
    unit: float = 1.0

    @property
    def numbers(self) -> F32:
        """The numbers that the codes stand for, in the order of the codes."""
        return np.array(self.table or np.arange(1 << sum(self.planes)) - self.offset, np.float32)


NVFP4_UNIT = 2.0**-7  # scales of halves are 64 to 127 units, so an f16 scale stays in the range of full precision
_DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ3 = (-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62)
CODINGS: dict[Format, Coding] = {
    "q4": Coding((4,), "line"),
    "q4s": Coding((4,), "scale", offset=8),
    "mxfp4": Coding((4,), "power", table=_DOUBLED_E2M1),
    "q6": Coding((4, 2), "halves", offset=32),
    "q5": Coding((4, 1), "line"),
    "q3": Coding((2, 1), "halves", offset=4),
    "q2": Coding((2,), "lines"),
    "iq4": Coding((4,), "scale", table=_IQ4),
    "iq3s": Coding((4,), "scale", table=tuple(range(-15, 16, 2))),
    "iq3": Coding((4,), "scale", table=_IQ3),
    "iq2": Coding((2, 1), "halves", table=(-43, -25, -8, 8, 25, 43, 0, 0), unit=0.125),
    "iq1": Coding((2, 1), "halves", table=(-9, -7, -1, 1, 7, 9, 0, 0), unit=0.125),
    "nvfp4": Coding((4,), "halves", table=_DOUBLED_E2M1, unit=NVFP4_UNIT),
}  # q8 has codes of whole bytes, which are int8

CODE_BYTES: dict[Format, int] = {name: 4 * sum(coding.planes) for name, coding in CODINGS.items()}
CODE_BYTES["q8"] = GROUP
FACTOR_BYTES: dict[Format, int] = {**dict.fromkeys(CODE_BYTES, 2), "mxfp4": 1}  # bytes that tiles keep together
WEIGHTED: tuple[Format, ...] = ("q4", "q4s")  # formats whose scales can be chosen by weighted errors
_HALF = GROUP // 2
_MOVES = (0.0, 0.06, 0.12)  # shares of a group's range by which a weighted fit moves its ends
_LARGEST_F16 = float(np.finfo(np.float16).max)


def quantise_groups(format: Format, values: F32, weights: F32 | None = None) -> U8:
    """Quantise the last axis in groups of 32: `[..., n]` float32 to `[..., n / 32, block bytes]` uint8.

    n must be a multiple of 32. `weights`, float32 and positive, are factors of the squared errors: `[n]`, or any shape
    that can be broadcast to that of `values`. Only the formats in `WEIGHTED` accept weights. By default, all errors
    count alike.
    """
    groups = _grouped(np.ascontiguousarray(values, np.float32))
    factors = None if weights is None else _grouped(np.ascontiguousarray(weights, np.float32))
    if format == "q4":
        return _quantise_line(CODINGS[format], groups, factors)
    if format == "q4s":
        return _quantise_q4s(groups, factors)
    assert factors is None  # the searches of the other formats have no weights
    if format == "q8":
        return _quantise_q8(groups)
    coding = CODINGS[format]
    if coding.factors == "power":
        return _quantise_mxfp4(groups)
    if coding.factors == "lines":
        return _quantise_lines(coding, groups)
    return _quantise_line(coding, groups) if coding.factors == "line" else _quantise_numbers(coding, groups)


def dequantise_groups(format: Format, blocks: U8) -> F32:
    """Dequantise blocks: `[..., groups, block bytes]` uint8 to `[..., groups * 32]` float32."""
    code_bytes = CODE_BYTES[format]
    scale, minimum = _lines(format, blocks[..., :-code_bytes])
    codes = np.ascontiguousarray(blocks[..., -code_bytes:])
    if format == "q8":
        numbers = codes.view(np.int8).astype(np.float32)
    else:
        numbers = CODINGS[format].numbers[unpack_codes(CODINGS[format].planes, codes)]
    parts = numbers.reshape(*scale.shape, GROUP // scale.shape[-1]) * scale[..., None]
    if minimum is not None:
        parts += minimum[..., None]
    return cast(F32, parts.reshape(*blocks.shape[:-2], blocks.shape[-2] * GROUP))


def group_factors(format: Format, blocks: U8) -> F32:
    """Return the scales and minima of each block.

    `blocks` is uint8 `[..., n * block bytes]`, blocks back to back; the result is float32 `[..., n, factors]`.
    """
    size, code_bytes = GROUP_BYTES[format], CODE_BYTES[format]
    each = blocks.reshape(*blocks.shape[:-1], blocks.shape[-1] // size, size)[..., :-code_bytes]
    scale, minimum = _lines(format, each)
    return scale if minimum is None else np.concatenate([scale, minimum], axis=-1)


def unpack_codes(planes: tuple[int, ...], codes: U8) -> U8:
    """Return the codes of groups, `[..., 32]`, from the bytes of their planes, `[..., 4 * bits]`."""
    whole = np.zeros((*codes.shape[:-1], 8, 4), np.uint8)
    at = below = 0
    for bits in planes:
        words = codes[..., at : at + 4 * bits].reshape(*codes.shape[:-1], bits, 4)
        for word in range(8):
            part = words[..., word % bits, :] >> np.uint8(word // bits * bits) & np.uint8((1 << bits) - 1)
            whole[..., word, :] |= part << np.uint8(below)
        at, below = at + 4 * bits, below + bits
    return whole.reshape(*codes.shape[:-1], GROUP)


def pack_codes(planes: tuple[int, ...], codes: U8) -> U8:
    """Return the bytes of the planes of groups, `[..., 4 * bits]`, from their codes, `[..., 32]`."""
    whole = codes.reshape(*codes.shape[:-1], 8, 4)
    out = np.zeros((*codes.shape[:-1], sum(planes), 4), np.uint8)
    at = 0
    for bits in planes:
        for word in range(8):
            part = whole[..., word, :] >> np.uint8(at) & np.uint8((1 << bits) - 1)
            out[..., at + word % bits, :] |= part << np.uint8(word // bits * bits)
        at += bits
    return out.reshape(*codes.shape[:-1], 4 * at)


def _lines(format: Format, raw: U8) -> tuple[F32, F32 | None]:
    """Decode the factors of blocks, `[..., bytes]`, to scales and minima.

    Each result is `[..., 1]`, or `[..., 2]` if the halves of a group have factors of their own. e8m0 scales are halved,
    because the table of mxfp4 holds doubled values.
    """
    raw = np.ascontiguousarray(raw)
    if format == "q8":
        return raw.view(np.float16).astype(np.float32), None
    coding = CODINGS[format]
    if coding.factors == "power":
        powers = np.ldexp(np.float32(1), raw.astype(np.int32) - 128)
        return np.asarray(np.where(raw == 255, np.nan, powers), np.float32), None
    if coding.factors == "halves":
        each = np.ascontiguousarray(raw[..., 2:]).view(np.int8).astype(np.float32) * np.float32(coding.unit)
        return _halves_at(raw, 0) * each, None
    if coding.factors == "lines":
        scale, offset = (np.concatenate([byte & 15, byte >> 4], axis=-1) for byte in (raw[..., 4:5], raw[..., 5:]))
        return _halves_at(raw, 0) * scale.astype(np.float32), -(_halves_at(raw, 2) * offset.astype(np.float32))
    factors = raw.view(np.float16).astype(np.float32)
    return factors[..., :1], factors[..., 1:] if coding.factors == "line" else None


def _halves_at(raw: U8, at: int) -> F32:
    return np.ascontiguousarray(raw[..., at : at + 2]).view(np.float16).astype(np.float32)


def _quantise_q8(groups: F32) -> U8:
    """Quantise groups to q8: try 8 scales that map the largest magnitude to the codes 120..127.

    Each group uses the scale with the smallest squared error.
    """
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    best = _scaled(groups, largest / np.float32(127))
    for divisor in (126, 125, 124, 123, 122, 121, 120):
        best = _closer(best, _scaled(groups, largest / np.float32(divisor)))
    _, codes, scale, _ = best
    return np.concatenate([_f16_bytes(scale), codes.astype(np.int8).view(np.uint8)], axis=-1)


def _quantise_line(coding: Coding, groups: F32, weights: F32 | None = None) -> U8:
    """Quantise groups by least squares: try several ranges, and fit each again to its rounded codes.

    Each group uses the range with the smallest squared error. With `weights`, the result of `_weighted_fit` is used
    instead where its weighted error is smaller.
    """
    most = np.float32((1 << sum(coding.planes)) - 1)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    best = _line(groups, (high - low) / most, low, most)
    for shrink in (1.0, 0.94, 0.88):
        half = (high - low) / 2 * np.float32(shrink)
        tried = _line(groups, half / (most / 2), (low + high) / 2 - half, most)
        for candidate in (tried, _line(groups, *_fit_line(tried[1], groups), most)):
            best = _closer(best, candidate)
    if weights is not None:
        plain = _line(groups, *best[2:], most, weights)
        best = _closer(plain, _line(groups, *_weighted_fit(groups, weights, low, high, most), most, weights))
    _, codes, scale, minimum = best
    planes = pack_codes(coding.planes, codes.astype(np.uint8))
    return np.concatenate([_f16_bytes(scale), _f16_bytes(minimum), planes], axis=-1)


def _weighted_fit(groups: F32, weights: F32, low: F32, high: F32, most: np.float32) -> tuple[F32, F32]:
    """Fit the values of each group with least weighted squares; return the scale and the minimum, `[..., 1]`.

    `low` and `high` are the ends of each group's range. Each end is moved inwards by the shares in `_MOVES`. For each
    such range, values are rounded to codes, and a line is fitted to the pairs (code, value). The best line is the one
    that explains most of the weighted variance of the values, because the rest of the variance is its error.
    """
    shares = weights / weights.sum(axis=-1, keepdims=True)
    mean, span = (groups * shares).sum(axis=-1, keepdims=True), high - low
    best = np.full_like(low, -1)
    scale, minimum = np.zeros_like(low), low
    for left, right in product(_MOVES, _MOVES):
        step = span * np.float32((1 - left - right) / most)
        codes = (groups - (low + span * np.float32(left))) * _inverse(step)
        np.clip(np.rint(codes, out=codes), 0, most, out=codes)
        mean_code = (codes * shares).sum(axis=-1, keepdims=True)
        codes -= mean_code
        weighted = codes * shares
        common = _dots(weighted, groups)
        slope = common / np.maximum(_dots(weighted, codes), np.float32(1e-9))
        explained = slope * common
        better = explained > best
        best = np.where(better, explained, best)
        scale = np.where(better, slope, scale)
        minimum = np.where(better, mean - slope * mean_code, minimum)
    return scale, minimum


def _quantise_q4s(groups: F32, weights: F32 | None) -> U8:
    """Quantise groups to q4s: try signed scales that map the largest magnitude to the code of an end, or near it.

    Each group uses the scale with the smallest squared error.
    """
    extreme = _extreme(groups)
    best = _line(groups, extreme / np.float32(-8), None, weights=weights)
    for divisor in (-8.5, -7.5, -7.0, 7.5, 7.0):
        best = _closer(best, _line(groups, extreme / np.float32(divisor), None, weights=weights))
    _, codes, scale, _ = best
    return np.concatenate([_f16_bytes(scale), pack_codes((4,), codes.astype(np.uint8))], axis=-1)


def _quantise_mxfp4(groups: F32) -> U8:
    """Quantise groups to mxfp4. The scale puts the largest magnitude into the top octave of e2m1."""
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    exponent = np.frexp(largest)[1] - 1 - 2 + 127  # 2^2 is the largest power of two in e2m1
    scale = np.where(largest > 0, np.clip(exponent, 1, 254), 0).astype(np.uint8)
    wanted = groups / _lines("mxfp4", scale)[0]
    codes = np.abs(wanted[..., None] - CODINGS["mxfp4"].numbers).argmin(axis=-1)
    return np.concatenate([scale, pack_codes((4,), codes.astype(np.uint8))], axis=-1)


def _quantise_numbers(coding: Coding, groups: F32) -> U8:
    """Quantise groups to the numbers that the coding can represent, each value to the nearest one.

    Each group, or each half of a group, has a scale: the best of several that are tried.
    """
    parts = groups.reshape(*groups.shape[:-1], 2 if coding.factors == "halves" else 1, -1)
    known = coding.numbers[:-2] if coding.table and len(coding.table) == 8 else coding.numbers
    numbers, codes_of = np.unique(known, return_index=True)
    extreme = _extreme(parts)
    best = scale = np.zeros_like(extreme)
    for end in (numbers[0], numbers[-1]):
        for shrink in (1.0, 1.06, 0.94, 0.88):
            tried = extreme / (end * np.float32(shrink))
            error = np.square(parts - numbers[_nearest(numbers, parts, tried)] * tried).sum(axis=-1, keepdims=True)
            better = (error < best) | (scale == 0)
            best, scale = np.where(better, error, best), np.where(better, tried, scale)
    if coding.factors == "scale":
        factors, scale = _f16_bytes(_as_f16(scale[..., 0])), _as_f16(scale)
    else:
        unit = np.float32(coding.unit)
        whole = _as_f16(np.abs(scale).max(axis=-2, keepdims=True) / (127 * unit))
        each = np.clip(np.rint(scale * _inverse(whole * unit)), -127, 127)
        factors = np.concatenate([_f16_bytes(whole[..., 0, :]), each[..., 0].astype(np.int8).view(np.uint8)], axis=-1)
        scale = whole * unit * each
    codes = codes_of.astype(np.uint8)[_nearest(numbers, parts, scale)].reshape(groups.shape)
    return np.concatenate([factors, pack_codes(coding.planes, codes)], axis=-1)


def _quantise_lines(coding: Coding, groups: F32) -> U8:
    """Quantise groups with a scale and a minimum for each half.

    The scale of a half is a multiple of the group's scale, and its minimum a multiple of the group's minimum.
    """
    most = np.float32((1 << sum(coding.planes)) - 1)
    parts = groups.reshape(*groups.shape[:-1], 2, _HALF)
    low = np.minimum(parts.min(axis=-1), 0)
    offset = _as_f16(-low.min(axis=-1, keepdims=True) / 15)
    offsets = np.rint(-low * _inverse(offset))
    wanted = (parts.max(axis=-1) + offset * offsets) / most
    scale = _as_f16(wanted.max(axis=-1, keepdims=True) / 15)
    scales = np.clip(np.rint(wanted * _inverse(scale)), 0, 15)
    each = (scale * scales)[..., None]
    codes = np.clip(np.rint((parts + (offset * offsets)[..., None]) * _inverse(each)), 0, most).astype(np.uint8)
    pairs = [
        (pair[..., :1].astype(np.uint8) | pair[..., 1:].astype(np.uint8) << np.uint8(4)) for pair in (scales, offsets)
    ]
    planes = pack_codes(coding.planes, codes.reshape(groups.shape))
    return np.concatenate([_f16_bytes(scale), _f16_bytes(offset), *pairs, planes], axis=-1)


_Line = tuple[F32, F32, F32, F32]  # squared error, codes, scale, minimum
_MOST = np.float32(15)  # largest code of 4 bits


def _scaled(groups: F32, scale: F32) -> _Line:
    """Compute the codes of `groups`, in -127..127, for a scale that is rounded to f16.

    The result also has the squared error of each group.
    """
    scale = _as_f16(scale)
    codes = np.clip(np.rint(groups * _inverse(scale)), -127, 127)
    error = np.square(groups - codes * scale).sum(axis=-1, keepdims=True)
    return error, codes, scale, scale


def _line(groups: F32, scale: F32, minimum: F32 | None, most: np.float32 = _MOST, weights: F32 | None = None) -> _Line:
    """Compute the codes of `groups`, in 0..most, for a scale and a minimum that are rounded to f16.

    The result also has the squared error of each group; `weights` are factors of its terms. If `minimum` is None, it
    is -8 times the scale.
    """
    scale = _as_f16(scale)
    low = scale * np.float32(-8) if minimum is None else _as_f16(minimum)
    codes = np.clip(np.rint((groups - low) * _inverse(scale)), 0, most)
    squares = np.square(groups - (codes * scale + low))
    error = (squares if weights is None else squares * weights).sum(axis=-1, keepdims=True)
    return error, codes, scale, low


def _closer(first: _Line, second: _Line) -> _Line:
    """Choose the candidate with the smaller error, for each group separately."""
    better = second[0] < first[0]
    error, codes, scale, low = (np.where(better, new, old) for old, new in zip(first, second, strict=True))
    return error, codes, scale, low


def _fit_line(codes: F32, groups: F32) -> tuple[F32, F32]:
    """Fit a least-squares line to the pairs (code, value) of each group. Return the slope and the intercept."""
    mean_code, mean = codes.mean(axis=-1, keepdims=True), groups.mean(axis=-1, keepdims=True)
    spread = np.square(codes - mean_code).sum(axis=-1, keepdims=True)
    slope = ((codes - mean_code) * (groups - mean)).sum(axis=-1, keepdims=True) / np.maximum(spread, np.float32(1e-9))
    return slope, mean - slope * mean_code


def _dots(first: F32, second: F32) -> F32:
    """Return the products of two vectors of each group, `[..., 1]`."""
    return np.asarray(np.einsum("...i,...i->...", first, second)[..., None])


def _grouped(values: F32) -> F32:
    return values.reshape(*values.shape[:-1], values.shape[-1] // GROUP, GROUP)


def _extreme(groups: F32) -> F32:
    """Return the value of each group whose magnitude is largest, with its sign, `[..., 1]`."""
    return np.take_along_axis(groups, np.abs(groups).argmax(axis=-1, keepdims=True), axis=-1)


def _nearest(numbers: F32, values: F32, scale: F32) -> U8:
    """Return the index of the number in the ascending `numbers` that is nearest to each of `values / scale`."""
    return np.searchsorted((numbers[1:] + numbers[:-1]) / 2, values * _inverse(scale)).astype(np.uint8)


def _as_f16(values: F32) -> F32:
    """Round `values` to f16 and return them as float32. Magnitudes beyond the range of f16 become its largest value."""
    return np.clip(values, -_LARGEST_F16, _LARGEST_F16).astype(np.float16).astype(np.float32)


def _f16_bytes(values: F32) -> U8:
    return values.astype(np.float16).view(np.uint8)


def _inverse(scale: F32) -> F32:
    """Return 1 / `scale`, but 0 where the scale is 0."""
    return cast(F32, np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0))

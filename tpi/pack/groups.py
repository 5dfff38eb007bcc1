"""Quantisation groups: conversion between 32 float32 values and the bytes of one quantised block.

The blocks are those of GGUF: q8 is Q8_0, q4 is Q4_1, q4s is Q4_0. A block holds an f16 scale, in q4 an f16 minimum, and
then the codes. In mxfp4 the scale is one byte, an exponent. Byte j of the 16 bytes of 4-bit codes holds value j in its
low half and value j + 16 in its high half.
"""

from typing import cast

import numpy as np
import numpy.typing as npt

from tpi.config import Format
from tpi.pack.layout import GROUP, GROUP_BYTES

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

CODE_BYTES: dict[Format, int] = {"q8": GROUP, "q4": GROUP // 2, "q4s": GROUP // 2, "mxfp4": GROUP // 2}
FACTOR_BYTES: dict[Format, int] = {"q8": 2, "q4": 2, "q4s": 2, "mxfp4": 1}  # size of a scale or a minimum
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # twice the value of each code
_LARGEST_F16 = float(np.finfo(np.float16).max)


def quantise_groups(format: Format, values: F32) -> U8:
    """Quantise the last axis in groups of 32: `[..., n]` float32 to `[..., n / 32, block bytes]` uint8.

    n must be a multiple of 32.
    """
    groups = np.ascontiguousarray(values, np.float32).reshape(*values.shape[:-1], values.shape[-1] // GROUP, GROUP)
    if format == "q8":
        return _quantise_q8(groups)
    if format == "mxfp4":
        return _quantise_mxfp4(groups)
    return _quantise_q4(groups) if format == "q4" else _quantise_q4s(groups)


def dequantise_groups(format: Format, blocks: U8) -> F32:
    """Dequantise blocks: `[..., groups, block bytes]` uint8 to `[..., groups * 32]` float32."""
    code_bytes = CODE_BYTES[format]
    factors = _factors(format, blocks[..., :-code_bytes])
    codes = np.ascontiguousarray(blocks[..., -code_bytes:])
    scale = factors[..., :1]
    if format == "q8":
        values = codes.view(np.int8).astype(np.float32) * scale
    elif format == "mxfp4":
        values = E2M1[np.concatenate([codes & 15, codes >> 4], axis=-1)] * scale
    else:
        halves = np.concatenate([codes & 15, codes >> 4], axis=-1).astype(np.float32)
        values = (halves - 8) * scale if format == "q4s" else halves * scale + factors[..., 1:]
    return cast(F32, values.reshape(*blocks.shape[:-2], blocks.shape[-2] * GROUP))


def group_factors(format: Format, blocks: U8) -> F32:
    """Return the scale, and in q4 the minimum, of each block.

    `blocks` is uint8 `[..., n * block bytes]`, blocks back to back; the result is float32 `[..., n, factors]`.
    """
    size, code_bytes = GROUP_BYTES[format], CODE_BYTES[format]
    each = blocks.reshape(*blocks.shape[:-1], blocks.shape[-1] // size, size)[..., :-code_bytes]
    return _factors(format, each)


def _factors(format: Format, raw: U8) -> F32:
    """Decode the bytes of scales and minima to float32. e8m0 scales are halved, because `E2M1` holds doubled values."""
    if format != "mxfp4":
        return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
    powers = np.ldexp(np.float32(1), raw.astype(np.int32) - 128)
    return np.asarray(np.where(raw == 255, np.nan, powers), np.float32)


def _quantise_q8(groups: F32) -> U8:
    """Quantise groups to q8: try 8 scales that map the largest magnitude to codes 120..127, and use the closest."""
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    best = _scaled(groups, largest / np.float32(127))
    for divisor in (126, 125, 124, 123, 122, 121, 120):
        best = _closer(best, _scaled(groups, largest / np.float32(divisor)))
    _, codes, scale, _ = best
    return np.concatenate([_f16_bytes(scale), codes.astype(np.int8).view(np.uint8)], axis=-1)


def _quantise_q4(groups: F32) -> U8:
    """Quantise groups to q4 by least squares: try several ranges, refit each to its rounded codes, use the closest."""
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    best = _line(groups, (high - low) / np.float32(15), low)
    for shrink in (1.0, 0.94, 0.88):
        half = (high - low) / 2 * np.float32(shrink)
        tried = _line(groups, half / np.float32(7.5), (low + high) / 2 - half)
        for candidate in (tried, _line(groups, *_fit_line(tried[1], groups))):
            best = _closer(best, candidate)
    _, codes, scale, minimum = best
    return np.concatenate([_f16_bytes(scale), _f16_bytes(minimum), _pack_codes(codes)], axis=-1)


def _quantise_q4s(groups: F32) -> U8:
    """Quantise groups to q4s: try signed scales that map the largest magnitude near an end code; use the closest."""
    index = np.abs(groups).argmax(axis=-1, keepdims=True)
    extreme = np.take_along_axis(groups, index, axis=-1)
    best = _line(groups, extreme / np.float32(-8), None)
    for divisor in (-8.5, -7.5, -7.0, 7.5, 7.0):
        best = _closer(best, _line(groups, extreme / np.float32(divisor), None))
    _, codes, scale, _ = best
    return np.concatenate([_f16_bytes(scale), _pack_codes(codes)], axis=-1)


def _quantise_mxfp4(groups: F32) -> U8:
    """Quantise groups to mxfp4: the scale puts the largest magnitude in the top octave of e2m1; values are rounded."""
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    exponent = np.frexp(largest)[1] - 1 - 2 + 127  # 2^2 is the largest power of two in e2m1
    scale = np.where(largest > 0, np.clip(exponent, 1, 254), 0).astype(np.uint8)
    wanted = groups / _factors("mxfp4", scale)
    codes = np.abs(wanted[..., None] - E2M1).argmin(axis=-1)
    return np.concatenate([scale, _pack_codes(codes.astype(np.float32))], axis=-1)


_Line = tuple[F32, F32, F32, F32]  # squared error, codes, scale, minimum


def _scaled(groups: F32, scale: F32) -> _Line:
    """Compute the codes of `groups`, in -127..127, for a scale rounded to f16, and the squared error of each group."""
    scale = _as_f16(scale)
    codes = np.clip(np.rint(groups * _inverse(scale)), -127, 127)
    error = np.square(groups - codes * scale).sum(axis=-1, keepdims=True)
    return error, codes, scale, scale


def _line(groups: F32, scale: F32, minimum: F32 | None) -> _Line:
    """Compute the codes of `groups`, in 0..15, for a scale and minimum rounded to f16, and the squared errors.

    If `minimum` is None, it is -8 times the scale.
    """
    scale = _as_f16(scale)
    low = scale * np.float32(-8) if minimum is None else _as_f16(minimum)
    codes = np.clip(np.rint((groups - low) * _inverse(scale)), 0, 15)
    error = np.square(groups - (codes * scale + low)).sum(axis=-1, keepdims=True)
    return error, codes, scale, low


def _closer(first: _Line, second: _Line) -> _Line:
    """Choose, for each group, the candidate with the smaller error."""
    better = second[0] < first[0]
    error, codes, scale, low = (np.where(better, new, old) for old, new in zip(first, second, strict=True))
    return error, codes, scale, low


def _fit_line(codes: F32, groups: F32) -> tuple[F32, F32]:
    """Fit a least-squares line to the (code, value) pairs of each group; return its slope and intercept."""
    mean_code, mean = codes.mean(axis=-1, keepdims=True), groups.mean(axis=-1, keepdims=True)
    spread = np.square(codes - mean_code).sum(axis=-1, keepdims=True)
    slope = ((codes - mean_code) * (groups - mean)).sum(axis=-1, keepdims=True) / np.maximum(spread, np.float32(1e-9))
    return slope, mean - slope * mean_code


def _pack_codes(codes: F32) -> U8:
    whole = codes.astype(np.uint8)
    return cast(U8, whole[..., : GROUP // 2] | whole[..., GROUP // 2 :] << np.uint8(4))


def _as_f16(values: F32) -> F32:
    """Round to f16 and return float32. Magnitudes beyond the range of f16 become its largest value."""
    return np.clip(values, -_LARGEST_F16, _LARGEST_F16).astype(np.float16).astype(np.float32)


def _f16_bytes(values: F32) -> U8:
    return values.astype(np.float16).view(np.uint8)


def _inverse(scale: F32) -> F32:
    """Return 1 / scale, and 0 where the scale is 0."""
    return cast(F32, np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0))

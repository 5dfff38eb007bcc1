"""Conversion of the groups of quantised safetensors (`tpi.sources.quantised.groups`) to groups of packs.

Codes do not change. Scales and minima are rounded to f16, which changes values by at most 1 in 2048 of each. This
affects float32 scales, and minima that are products of a scale and a zero point.
"""

import numpy as np
import numpy.typing as npt

from tpi.pack.groups import CODINGS, NVFP4_UNIT, pack_codes
from tpi.sources.elements import Element
from tpi.sources.quantised.groups import NVFP4, split_groups

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
_FACTORS = np.arange(64, 128, 8, dtype=np.float32)


def recode(element: Element, raw: U8) -> U8:
    """Convert groups, `[rows, groups * 40]` bytes, to groups of `element.nearest`, `[rows, groups * group bytes]`."""
    scale, offset, codes = split_groups(raw)
    if element.nearest == "q8":
        numbers = (codes.astype(np.int16) - offset.astype(np.int16)).astype(np.int8)
        groups = np.concatenate([_f16(scale), numbers.view(np.uint8)], axis=-1)
    else:
        factors = _nvfp4(scale, offset) if element.name == NVFP4 else _factors(element, scale, offset)
        groups = np.concatenate([factors, pack_codes(CODINGS[element.nearest].planes, codes)], axis=-1)
    return groups.reshape(len(raw), -1)


def _factors(element: Element, scale: F32, offset: F32) -> U8:
    """Return the bytes of the factors of groups with integer codes, `[rows, groups, bytes]`.

    `scale` and `offset` are the two factors of the source's groups (`tpi.sources.quantised.groups`).
    """
    if element.nearest == "q4s":
        return _f16(scale)
    if element.nearest in ("q3", "q6"):  # the factor of both halves is 1
        return np.concatenate([_f16(scale), np.ones((*scale.shape[:2], 2), np.uint8)], axis=-1)
    if element.nearest == "q2":  # both factors of both halves are 1
        ones = np.full((*scale.shape[:2], 2), 0x11, np.uint8)
        return np.concatenate([_f16(scale), _f16(offset * scale), ones], axis=-1)
    minimum = offset if element.name.startswith("LINE") else -offset * scale
    return np.concatenate([_f16(scale), _f16(minimum)], axis=-1)


def _nvfp4(first: F32, second: F32) -> U8:
    """Return an f16 scale and the factors of both halves, `[rows, groups, 4]`.

    `first` and `second` are the scales of the halves. The factor of the larger scale is the multiple of 8, from 64 to
    120, for which the other factor is closest to a whole number. Scales have 4 significant bits, so both factors are
    exact unless the other scale is below 1/8 of the larger one. Then the error of the smaller factor is at most half a
    unit: 1 in 128 of the larger scale.
    """
    scales = np.concatenate([first, second], axis=-1)
    largest = np.abs(scales).max(axis=-1, keepdims=True)
    shares = np.divide(scales, largest, out=np.zeros_like(scales), where=largest != 0)
    exact = shares.min(axis=-1, keepdims=True) * _FACTORS
    chosen = _FACTORS[(np.abs(np.rint(exact) - exact) / _FACTORS).argmin(axis=-1)][..., None]
    factors = np.rint(shares * chosen).astype(np.int8)
    unit = chosen * np.float32(2 * NVFP4_UNIT)  # numbers of the format are doubled
    return np.concatenate([_f16(largest / unit), factors.view(np.uint8)], axis=-1)


def _f16(values: F32) -> U8:
    with np.errstate(over="ignore"):  # infinity, which the writer refuses
        return np.ascontiguousarray(values.astype("<f2")).view(np.uint8)

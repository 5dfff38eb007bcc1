"""Conversion of GGUF's blocks to the groups of packs, with the codes of the source.

A super-block of 256 values becomes 8 groups of 32. Factors that a super-block keeps in two steps are multiplied and
rounded to f16, which changes values by at most 1 in 2048 (Q4_K, Q5_K, IQ4_XS, IQ3_XXS, IQ3_S). All other conversions
are exact. Types whose codes are indices of a code book are decoded and coded again.
"""

from collections.abc import Callable
from typing import cast

import numpy as np
import numpy.typing as npt

from tpi.config import Format
from tpi.pack.builder.recode import recode
from tpi.pack.groups import CODINGS, pack_codes
from tpi.pack.layout import GROUP, GROUP_BYTES
from tpi.sources.elements import Element, decode
from tpi.sources.quantised.groups import FORMATS

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
Groups = tuple[U8, U8]  # factors `[blocks, groups, bytes]`, and codes `[blocks, groups, 32]`
_SHIFTS = np.arange(8, dtype=np.uint8)


def transcode(element: Element, raw: U8) -> U8:
    """Convert the source's blocks to groups of `element.nearest`: `[rows, bytes]` to `[rows, groups * group bytes]`."""
    if element.name in FORMATS:
        return recode(element, raw)
    convert, format = _CONVERSIONS.get(element.name), element.nearest
    if convert is None or not raw.size:
        return raw if convert is None else _empty(element, format, raw)
    factors, codes = convert(np.ascontiguousarray(raw).reshape(-1, element.group_bytes))
    planes = pack_codes(CODINGS[format].planes, codes)
    return np.concatenate([factors, planes], axis=-1).reshape(len(raw), -1)


def _empty(element: Element, format: Format, raw: U8) -> U8:
    values = raw.shape[1] // element.group_bytes * element.group
    return np.zeros((len(raw), values // GROUP * GROUP_BYTES[format]), np.uint8)


def _halves(blocks: U8, at: int) -> F32:
    """Return the f16 number at byte `at` of each block, as float32 `[blocks, 1]`."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _f16(values: F32) -> U8:
    """Round float32 `[blocks, groups]` to f16 and return the bytes, `[blocks, groups, 2]`."""
    return values.astype("<f2").view(np.uint8).reshape(*values.shape, 2)


def _repeated(blocks: U8, at: int, groups: int = 8) -> U8:
    """Return the two bytes at `at` of each block, repeated for each of its groups, `[blocks, groups, 2]`."""
    return np.repeat(blocks[:, None, at : at + 2], groups, axis=1)


def _spread(packed: U8, run: int, bits: int) -> U8:
    """Unpack codes of `bits` bits, `[blocks, bytes]` to `[blocks, codes]`.

    The lowest bits of `run` successive bytes are the first `run` codes, the next higher bits the next `run` codes,
    and so on; then come the next `run` bytes.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    parts = packed.reshape(len(packed), -1, 1, run) >> shifts & np.uint8((1 << bits) - 1)
    return cast(U8, parts.reshape(len(packed), -1))


def _grouped(codes: U8) -> U8:
    return codes.reshape(len(codes), -1, GROUP)


def _six_bits(packed: U8) -> tuple[U8, U8]:
    """Unpack the 8 scales and 8 minima of 6 bits of Q4_K and Q5_K from 12 bytes; each is `[blocks, 8]`."""
    low, minima, high = (packed[:, at : at + 4] for at in (0, 4, 8))
    scales = [low & 63, high & 15 | low >> 2 & 48]
    return np.concatenate(scales, axis=1), np.concatenate([minima & 63, high >> 4 | minima >> 2 & 48], axis=1)


def _lines_of(blocks: U8) -> U8:
    """Return the f16 scales and minima of the groups of Q4_K and Q5_K blocks, `[blocks, 8, 4]`."""
    scales, minima = _six_bits(blocks[:, 4:16])
    return np.concatenate([_f16(_halves(blocks, 0) * scales), _f16(-_halves(blocks, 2) * minima)], axis=-1)


def _q4_k(blocks: U8) -> Groups:
    return _lines_of(blocks), _grouped(_spread(blocks[:, 16:], 32, 4))


def _q5_k(blocks: U8) -> Groups:
    high = _spread(blocks[:, 16:48], 32, 1)
    return _lines_of(blocks), _grouped(_spread(blocks[:, 48:], 32, 4) | high << np.uint8(4))


def _q5_1(blocks: U8) -> Groups:
    return blocks[:, None, :4], _grouped(_five_bits(blocks[:, 4:]))


def _q5_0(blocks: U8) -> Groups:
    scale = blocks[:, None, :2]
    factors = np.concatenate([scale, _f16(-16 * _halves(blocks, 0))], axis=-1)
    return factors, _grouped(_five_bits(blocks[:, 2:]))


def _five_bits(blocks: U8) -> U8:
    high = (blocks[:, :4, None] >> _SHIFTS & np.uint8(1)).reshape(len(blocks), GROUP)
    return cast(U8, _spread(blocks[:, 4:], 16, 4) | high << np.uint8(4))


def _q6_k(blocks: U8) -> Groups:
    codes = _spread(blocks[:, :128], 64, 4) | _spread(blocks[:, 128:192], 32, 2) << np.uint8(4)
    return np.concatenate([_repeated(blocks, 208), blocks[:, 192:208].reshape(-1, 8, 2)], axis=-1), _grouped(codes)


def _q3_k(blocks: U8) -> Groups:
    codes = _spread(blocks[:, 32:96], 32, 2) | _spread(blocks[:, :32], 32, 1) << np.uint8(2)
    scales = _spread(blocks[:, 96:104], 8, 4) | _spread(blocks[:, 104:108], 4, 2) << np.uint8(4)
    each = (scales - np.uint8(32)).reshape(-1, 8, 2)  # int8, from -32
    return np.concatenate([_repeated(blocks, 108), each], axis=-1), _grouped(codes)


def _q2_k(blocks: U8) -> Groups:
    pairs = blocks[:, :16].reshape(-1, 8, 2)
    scales, minima = pairs & 15, pairs >> 4
    each = [(half[..., :1] | half[..., 1:] << np.uint8(4)) for half in (scales, minima)]
    factors = np.concatenate([_repeated(blocks, 80), _repeated(blocks, 82), *each], axis=-1)
    return factors, _grouped(_spread(blocks[:, 16:80], 32, 2))


def _iq4_nl(blocks: U8) -> Groups:
    return blocks[:, None, :2], _grouped(_spread(blocks[:, 2:], 16, 4))


def _iq4_xs(blocks: U8) -> Groups:
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & np.uint8(15)).reshape(-1, 8)
    high = (blocks[:, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8) & np.uint8(3)).reshape(-1, 8)
    scales = (low | high << np.uint8(4)).astype(np.float32) - 32
    return _f16(_halves(blocks, 0) * scales), _grouped(_spread(blocks[:, 8:], 16, 4))


def _iq3_xxs(blocks: U8) -> Groups:
    scales = blocks[:, 69:98:4] >> 4
    return _recoded("IQ3_XXS", blocks, _halves(blocks, 0) * (np.float32(0.5) + scales) / 2)


def _iq3_s(blocks: U8) -> Groups:
    return _recoded("IQ3_S", blocks, _halves(blocks, 0) * (1 + 2 * _pairs(blocks[:, 106:110])).astype(np.float32))


def _recoded(name: str, blocks: U8, scales: F32) -> Groups:
    """Encode the values of blocks again. `scales`, `[blocks, 8]`, has the scale of each group.

    A value divided by its scale is a number of the format's table.
    """
    return _f16(scales), _codes_of(name, blocks, scales)


def _iq2_xxs(blocks: U8) -> Groups:
    return _by_halves("IQ2_XXS", blocks, np.repeat(blocks[:, 9:66:8] >> 4, 2, axis=1))


def _iq2_xs(blocks: U8) -> Groups:
    return _by_halves("IQ2_XS", blocks, _pairs(blocks[:, 66:74]))


def _iq2_s(blocks: U8) -> Groups:
    return _by_halves("IQ2_S", blocks, _pairs(blocks[:, 74:82]))


def _iq1_s(blocks: U8) -> Groups:
    return _by_halves("IQ1_S", blocks, np.repeat(blocks[:, 35:50:2] >> 4 & 7, 2, axis=1))


def _iq1_m(blocks: U8) -> Groups:
    words = np.ascontiguousarray(blocks[:, 48:56]).view("<u2")
    parts = words >> 12 << np.array([0, 4, 8, 12], np.uint16)
    scale = np.bitwise_or.reduce(parts, axis=1, keepdims=True).astype("<u2").view(np.uint8)
    scales = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(-1, 16).astype(np.uint8)
    return _by_halves("IQ1_M", blocks, scales, scale)


def _by_halves(name: str, blocks: U8, scales: U8, whole: U8 | None = None) -> Groups:
    """Encode the values of blocks again, with one scale for each half of a group.

    A half's scale is the block's f16 scale times `(2 * scales + 1) / 8`, with `scales` `[blocks, 16]`. `whole` is the
    bytes of the block's f16 scale, by default the first two bytes of the block.
    """
    whole = blocks[:, :2] if whole is None else whole
    each = 2 * scales + 1
    factors = np.concatenate([_repeated(whole, 0), each.reshape(-1, 8, 2)], axis=-1)
    return factors, _codes_of(name, blocks, _halves(whole, 0) * each.astype(np.float32) * np.float32(0.125))


def _codes_of(name: str, blocks: U8, scales: F32) -> U8:
    """Return the codes of blocks, `[blocks, 8, 32]`, for `scales`, `[blocks, n]`, each of 256 / n values.

    A code is the index of the format's number that is nearest to the exact value divided by its scale.
    """
    element = Element(name, 256, blocks.shape[1])
    values = decode(element, blocks).reshape(*scales.shape, -1)
    coding = CODINGS[element.nearest]
    numbers = coding.numbers[:-2] if len(coding.table) == 8 else coding.numbers
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)[..., None]
    codes = np.searchsorted((numbers[1:] + numbers[:-1]) / 2, values * inverse)
    return codes.astype(np.uint8).reshape(len(blocks), 8, GROUP)


def _pairs(packed: U8) -> U8:
    """Return the low four bits of all bytes of a block, then their high four bits."""
    return cast(U8, (packed[:, :, None] >> np.array([0, 4], np.uint8) & np.uint8(15)).reshape(len(packed), -1))


def _small(name: str, group: int, at: int) -> Callable[[U8], Groups]:
    """Return the conversion of a type whose values are -1, 0, 1 or 2 times the f16 scale at byte `at` of a block.

    A block has `group` values.
    """

    def convert(blocks: U8) -> Groups:
        groups, whole = group // GROUP, _repeated(blocks, at, group // GROUP)
        scales = np.repeat(_halves(blocks, at), groups, axis=1)
        values = decode(Element(name, group, blocks.shape[1]), blocks).reshape(*scales.shape, GROUP)
        inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)[..., None]
        ones = np.full((len(blocks), groups, 2), 0x11, np.uint8)
        factors = np.concatenate([whole, whole, ones], axis=-1)
        return factors, np.asarray(np.rint(values * inverse) + 1, np.float32).astype(np.uint8)

    return convert


_CONVERSIONS: dict[str, Callable[[U8], Groups]] = {
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q5_1": _q5_1, "Q5_0": _q5_0, "Q6_K": _q6_k, "Q3_K": _q3_k, "Q2_K": _q2_k,
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s, "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s, "IQ1_S": _iq1_s, "IQ1_M": _iq1_m,
    "TQ1_0": _small("TQ1_0", 256, 52), "TQ2_0": _small("TQ2_0", 256, 64), "Q1_0": _small("Q1_0", 128, 0),
    "Q2_0": _small("Q2_0", 64, 0),
}  # fmt: skip

"""Between float32 vectors, GGUF blocks and the bytes of units: the one place that knows the order of bytes.

A *group* is 32 values that share a scale. In the `record` layout a vector is its groups one after the other, each
exactly a GGUF block (Q8_0, Q4_1, Q4_0): f16 scale, [f16 minimum,] codes; the 16 bytes of 4-bit codes hold value j in
the low and value j + 16 in the high half of byte j.

In the `tiled` layout a part of a unit is a matrix of outputs x inputs (row parts: width x hidden, column parts: hidden
x width) cut in tiles of 8 outputs x 32 inputs, in order of outputs, then inputs. A tile is the codes of its 8 groups
interleaved by 4-byte words (word 0 of output 0..7, word 1 of output 0..7, ...), then 8 f16 scales, then for q4 8 f16
minima. A 32-byte load therefore holds 4 consecutive inputs (4-bit: 4 in the low halves, 4 others 16 further in the
high halves) of each of the 8 outputs, one output per 32-bit lane.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

from tpi.config import Format
from tpi.errors import ModelError
from tpi.pack.layout import GROUP, GROUP_BYTES, TILE_OUTPUTS, Part, RunLayout

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

GgufType = Literal["Q4_0", "Q4_1", "Q8_0"]
GGUF_FORMATS: dict[GgufType, Format] = {"Q4_0": "q4s", "Q4_1": "q4", "Q8_0": "q8"}

_CODE_BYTES: dict[Format, int] = {"q8": GROUP, "q4": GROUP // 2, "q4s": GROUP // 2}


def part_bytes(part: Part, run: RunLayout) -> int:
    """Bytes of one part of one unit."""
    return run.width * part.vector_bytes(run.hidden)


def encode_part(part: Part, run: RunLayout, vectors: F32) -> U8:
    """Encode one part of some units: `[units * width, hidden]` float32 to `[units, part_bytes]`.

    The vectors are rows, or columns, of the weight matrix, zeros where the unit is padded. In the record layout the
    result is vector after vector; `assemble` interleaves the parts.

    Raises:
        ModelError: if the vectors do not fill whole units, or f32 or bf16 is asked for in the tiled layout.
    """
    units = _whole_units(run, len(vectors))
    if part.format in ("f32", "bf16"):
        _require_record(part, run)
        encoded = _encode_plain(part.format, vectors)
    elif run.layout == "record":
        encoded = quantise_groups(part.format, vectors)
    else:
        outputs = vectors.reshape(units, run.width, run.hidden)
        if part.axis == "column":
            outputs = outputs.swapaxes(1, 2)
        encoded = _tile(part.format, quantise_groups(part.format, np.ascontiguousarray(outputs)))
    return encoded.reshape(units, part_bytes(part, run))


def encode_gguf_part(part: Part, run: RunLayout, blocks: U8) -> U8:
    """Encode one part of some units from GGUF blocks, bit-exactly: to `[units, part_bytes]`.

    `blocks` is raw bytes of Q8_0 (part.format q8), Q4_1 (q4) or Q4_0 (q4s): for a row part
    `[units * width, hidden/32 * block]`, the unit's rows; for a column part `[hidden, units * width/32 * block]`, the
    units' slice of each row of the tensor.

    Raises:
        ModelError: if the shape does not fit, or a column part is asked for in the record layout (there groups run
            along hidden, so the codes cannot be kept).
    """
    group = GROUP_BYTES[part.format]
    if part.axis == "row":
        units = _whole_units(run, len(blocks))
        groups = blocks.reshape(units, run.width, run.hidden // GROUP, group)
        encoded = groups if run.layout == "record" else _tile(part.format, groups)
        return np.ascontiguousarray(encoded).reshape(units, part_bytes(part, run))
    if run.layout == "record":
        raise ModelError(f"GGUF blocks of {part.name} cannot be kept in the record layout; quantise it again")
    units = _whole_units(run, blocks.shape[1] // group * GROUP)
    by_unit = blocks.reshape(run.hidden, units, run.width // GROUP, group).swapaxes(0, 1)
    return _tile(part.format, by_unit).reshape(units, part_bytes(part, run))


def assemble(run: RunLayout, parts: dict[str, U8]) -> U8:
    """Units from their encoded parts (`[units, part_bytes]` by name): `[units, unit_bytes]`."""
    ordered = [parts[part.name] for part in run.parts]
    if run.layout == "tiled":
        return np.concatenate(ordered, axis=1)
    units = len(ordered[0])
    records = [encoded.reshape(units, run.width, -1) for encoded in ordered]
    return np.concatenate(records, axis=2).reshape(units, run.unit_bytes)


def decode_part(part: Part, run: RunLayout, units: U8) -> F32:
    """The vectors of one part, `[units * width, hidden]` float32, from `[units, unit_bytes]`.

    For f32 in the record layout this is a view with a stride of one record where alignment permits.
    """
    offset, size = run.part_offset(part.name), part.vector_bytes(run.hidden)
    if run.layout == "record":
        records = units.reshape(len(units) * run.width, run.record_bytes)
        vectors = records[:, offset : offset + size]
        return _decode_plain(part.format, vectors) if part.format in ("f32", "bf16") else _decode(part.format, vectors)
    encoded = units[:, offset : offset + run.width * size]
    outputs, inputs = (run.width, run.hidden) if part.axis == "row" else (run.hidden, run.width)
    groups = _untile(part.format, np.ascontiguousarray(encoded), outputs, inputs)
    values = _decode(part.format, groups.reshape(len(units), outputs, -1))
    if part.axis == "column":
        values = values.swapaxes(1, 2)
    return np.ascontiguousarray(values.reshape(-1, run.hidden))


def quantise_groups(format: Format, values: F32) -> U8:
    """GGUF-style blocks of the last axis (a multiple of 32): `[..., n]` float32 to `[..., n/32, block]` uint8."""
    groups = np.ascontiguousarray(values, np.float32).reshape(*values.shape[:-1], -1, GROUP)
    if format == "q8":
        return _quantise_q8(groups)
    return _quantise_q4(groups) if format == "q4" else _quantise_q4s(groups)


def dequantise_groups(format: Format, blocks: U8) -> F32:
    """Inverse of `quantise_groups`: `[..., groups, block]` uint8 to `[..., groups * 32]` float32."""
    return _decode(format, blocks.reshape(*blocks.shape[:-2], -1))


def _quantise_q8(groups: F32) -> U8:
    scale = (np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float16)
    codes = np.clip(np.rint(groups * _inverse(scale)), -127, 127).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=-1)


def _quantise_q4(groups: F32) -> U8:
    """Scale and minimum by least squares: start at the range, refit to the rounded codes, keep what is closer."""
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    best_scale, best_low, best_error = None, None, None
    for shrink in (1.0, 0.94, 0.88):
        middle, half = (low + high) / 2, (high - low) / 2 * np.float32(shrink)
        scale, minimum = half / np.float32(7.5), middle - half
        for _ in range(2):
            scale, minimum = _as_f16(scale), _as_f16(minimum)
            codes = np.clip(np.rint((groups - minimum) * _inverse(scale)), 0, 15)
            error = np.square(groups - (codes * scale + minimum)).sum(axis=-1, keepdims=True)
            if best_error is None:
                best_scale, best_low, best_error = scale, minimum, error
            closer = error < best_error
            best_scale, best_low = np.where(closer, scale, best_scale), np.where(closer, minimum, best_low)
            best_error = np.where(closer, error, best_error)
            scale, minimum = _fit_line(codes, groups)
    assert best_scale is not None and best_low is not None
    codes = np.clip(np.rint((groups - best_low) * _inverse(best_scale)), 0, 15).astype(np.uint8)
    return _block(codes, best_scale, best_low)


def _quantise_q4s(groups: F32) -> U8:
    """Signed scale that puts the largest magnitude at code 0 or near 15, whichever is closer over the group."""
    index = np.abs(groups).argmax(axis=-1, keepdims=True)
    extreme = np.take_along_axis(groups, index, axis=-1)
    best_scale, best_error = None, None
    for divisor in (-8.0, -8.5, -7.5, -7.0, 7.5, 7.0):
        scale = _as_f16(extreme / np.float32(divisor))
        codes = np.clip(np.rint(groups * _inverse(scale)), -8, 7)
        error = np.square(groups - codes * scale).sum(axis=-1, keepdims=True)
        if best_scale is None or best_error is None:
            best_scale, best_error = scale, error
        best_scale = np.where(error < best_error, scale, best_scale)
        best_error = np.minimum(error, best_error)
    assert best_scale is not None
    codes = (np.clip(np.rint(groups * _inverse(best_scale)), -8, 7) + 8).astype(np.uint8)
    return _block(codes, best_scale)


def _fit_line(codes: F32, groups: F32) -> tuple[F32, F32]:
    """Scale and minimum of the least-squares line through (code, value) of each group."""
    mean_code, mean = codes.mean(axis=-1, keepdims=True), groups.mean(axis=-1, keepdims=True)
    spread = np.square(codes - mean_code).sum(axis=-1, keepdims=True)
    slope = ((codes - mean_code) * (groups - mean)).sum(axis=-1, keepdims=True) / np.maximum(spread, 1e-9)
    return np.asarray(slope, np.float32), np.asarray(mean - slope * mean_code, np.float32)


def _block(codes: U8, *factors: F32) -> U8:
    """GGUF block bytes: f16 factors, then 4-bit codes, value j in the low and j + 16 in the high half of byte j."""
    packed = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
    return np.concatenate([*(factor.astype(np.float16).view(np.uint8) for factor in factors), packed], axis=-1)


def _as_f16(values: F32) -> F32:
    """Rounded to f16 (magnitudes beyond its range become its largest), as float32."""
    largest = float(np.finfo(np.float16).max)
    return np.clip(values, -largest, largest).astype(np.float16).astype(np.float32)


def _inverse(scale: npt.NDArray[np.floating]) -> F32:
    """1 / scale in float32, 0 where the scale is 0."""
    wide = scale.astype(np.float32)
    return np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide != 0)


def _decode(format: Format, vectors: U8) -> F32:
    """`[..., groups * block]` bytes in record order to `[..., groups * 32]` float32."""
    groups = vectors.shape[-1] // GROUP_BYTES[format]
    blocks = vectors.reshape(*vectors.shape[:-1], groups, GROUP_BYTES[format])
    code_bytes = _CODE_BYTES[format]
    factors = np.ascontiguousarray(blocks[..., :-code_bytes]).view(np.float16).astype(np.float32)
    codes = np.ascontiguousarray(blocks[..., -code_bytes:])
    if format == "q8":
        values = codes.view(np.int8).astype(np.float32) * factors
    else:
        halves = np.concatenate([codes & 15, codes >> 4], axis=-1).astype(np.float32)
        scale = factors[..., :1]
        values = (halves - 8) * scale if format == "q4s" else halves * scale + factors[..., 1:]
    return np.asarray(values.reshape(*vectors.shape[:-1], groups * GROUP), np.float32)


def _encode_plain(format: Format, vectors: F32) -> U8:
    vectors = np.ascontiguousarray(vectors, np.float32)
    if format == "f32":
        return vectors.view(np.uint8)
    bits = vectors.view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1)  # to nearest, ties to even
    rounded = np.where(np.isnan(vectors), bits | 0x400000, rounded)
    return (rounded >> 16).astype(np.uint16).view(np.uint8)


def _decode_plain(format: Format, vectors: U8) -> F32:
    if format == "f32":
        return vectors.view(np.float32)
    return (vectors.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _tile(format: Format, groups: U8) -> U8:
    """Record-order groups `[units, outputs, input groups, block]` (or flat in the last two) to tiles, 2-D per unit."""
    units, outputs = groups.shape[:2]
    code_bytes = _CODE_BYTES[format]
    blocks = groups.reshape(units, outputs // TILE_OUTPUTS, TILE_OUTPUTS, -1, GROUP_BYTES[format])
    blocks = blocks.transpose(0, 1, 3, 2, 4)  # unit, output tile, input group, output, byte
    leading = blocks.shape[:3]
    words = blocks[..., -code_bytes:].reshape(*leading, TILE_OUTPUTS, -1, 4).swapaxes(3, 4).reshape(*leading, -1)
    factors = blocks[..., :-code_bytes].reshape(*leading, TILE_OUTPUTS, -1, 2).swapaxes(3, 4).reshape(*leading, -1)
    return np.concatenate([words, factors], axis=-1).reshape(units, -1)


def _untile(format: Format, tiles: U8, outputs: int, inputs: int) -> U8:
    """Inverse of `_tile`: `[units, part_bytes]` to `[units, outputs, input groups, block]`."""
    code_bytes = _CODE_BYTES[format]
    leading = (len(tiles), outputs // TILE_OUTPUTS, inputs // GROUP)
    tiles = tiles.reshape(*leading, -1)
    words = tiles[..., : TILE_OUTPUTS * code_bytes].reshape(*leading, -1, TILE_OUTPUTS, 4).swapaxes(3, 4)
    factors = tiles[..., TILE_OUTPUTS * code_bytes :].reshape(*leading, -1, TILE_OUTPUTS, 2).swapaxes(3, 4)
    codes = words.reshape(*leading, TILE_OUTPUTS, code_bytes)
    scales = factors.reshape(*leading, TILE_OUTPUTS, -1)
    blocks = np.concatenate([scales, codes], axis=-1).swapaxes(2, 3)
    return blocks.reshape(len(tiles), outputs, inputs // GROUP, -1)


def _whole_units(run: RunLayout, vectors: int) -> int:
    if vectors % run.width:
        raise ModelError(f"{vectors} vectors do not fill units of {run.width}; pad them with zeros")
    return vectors // run.width


def _require_record(part: Part, run: RunLayout) -> None:
    if run.layout != "record":
        raise ModelError(f"{part.name} in {part.format} needs the record layout")

"""Conversion between float32 vectors, GGUF blocks and the bytes of units. Defines the order of bytes in both layouts.

In the `record` layout a vector is stored as its groups of 32 values, each a GGUF block (`tpi.pack.groups`).

In the `tiled` layout a part of a unit is a matrix of outputs x inputs: width x hidden for row parts, hidden x width for
column parts. It is cut into tiles of 8 outputs x 32 inputs, ordered by output, then by input. A tile holds:

1. The codes of its 8 groups, interleaved by 4-byte words: word 0 of outputs 0..7, word 1 of outputs 0..7, and so on.
2. The first two bytes of the factors of its 8 groups: f16 scales. For mxfp4, it is one byte each.
3. The next two bytes of the 8 groups, and so on: f16 minima, or pairs of factors (`tpi.pack.groups`).

So a 32-byte load gets 4 consecutive inputs of each of the 8 outputs, one output per 32-bit lane. With 4-bit codes these
4 inputs are in the low halves of the bytes, and the 4 inputs 16 positions further are in the high halves.
"""

from typing import cast

import numpy as np

from tpi.config import Format
from tpi.errors import ModelError
from tpi.pack.groups import CODE_BYTES, F32, FACTOR_BYTES, U8, dequantise_groups, quantise_groups
from tpi.pack.layout import GROUP, GROUP_BYTES, TILE_OUTPUTS, Part, RunLayout, is_quantised


def part_bytes(part: Part, run: RunLayout) -> int:
    """Return the size in bytes of one part of one unit."""
    return run.width * part.vector_bytes(run.hidden)


def encode_part(part: Part, run: RunLayout, vectors: F32, weights: F32 | None = None) -> U8:
    """Encode one part of some units: `[units * width, hidden]` float32 to `[units, part_bytes]`.

    The vectors are rows or columns of the weight matrix, and zeros where a unit is padded. In the record layout the
    result holds the vectors back to back; `assemble` interleaves the parts.

    `weights` are the factors of squared errors in `quantise_groups`, one for each input of the matrix: `[hidden]` for
    a row part, `[units * width]` for a column part in the tiled layout. They are not possible for other parts.

    Raises:
        ModelError: if the vectors do not fill whole units, or an f32 or bf16 part has the tiled layout.
    """
    units = _whole_units(run, len(vectors))
    if not is_quantised(part.format):
        _require_record(part, run)
        encoded = _encode_plain(part.format, vectors)
    elif run.layout == "record":
        encoded = quantise_groups(part.format, vectors, weights)
    else:
        outputs = vectors.reshape(units, run.width, run.hidden)
        if part.axis == "column":
            outputs = outputs.swapaxes(1, 2)
            weights = None if weights is None else weights.reshape(units, 1, run.width)
        encoded = _tile(part.format, quantise_groups(part.format, np.ascontiguousarray(outputs), weights))
    return encoded.reshape(units, part_bytes(part, run))


def encode_gguf_part(part: Part, run: RunLayout, blocks: U8) -> U8:
    """Rearrange GGUF blocks into one part of some units, `[units, part_bytes]`, without changing a code or scale.

    `blocks` holds groups of the part's format (`tpi.pack.builder.transcode`). For a row part it
    is `[units * width, hidden / 32 * block bytes]`, the units' rows. For a column part it is
    `[hidden, units * width / 32 * block bytes]`, the units' slice of each row of the tensor.

    Raises:
        ModelError: if the shape does not fit, or a column part has the record layout. There, groups run along the
            hidden axis, so the codes cannot be reused.
    """
    group = GROUP_BYTES[part.format]
    if part.axis == "row":
        units = _whole_units(run, len(blocks))
        groups = blocks.reshape(units, run.width, run.hidden // GROUP, group)
        encoded = np.ascontiguousarray(groups) if run.layout == "record" else _tile(part.format, groups)
        return encoded.reshape(units, part_bytes(part, run))
    if run.layout == "record":
        raise ModelError(f"GGUF blocks of {part.name} cannot be copied to the record layout; quantise the values again")
    units = _whole_units(run, blocks.shape[1] // group * GROUP)
    by_unit = blocks.reshape(run.hidden, units, run.width // GROUP, group).swapaxes(0, 1)
    return _tile(part.format, by_unit).reshape(units, part_bytes(part, run))


def assemble(run: RunLayout, parts: dict[str, U8]) -> U8:
    """Combine the encoded parts, `[units, part_bytes]` by name, into units, `[units, unit_bytes]`."""
    ordered = [parts[part.name] for part in run.parts]
    if run.layout == "tiled":
        return np.concatenate(ordered, axis=1)
    units = len(ordered[0])
    records = [encoded.reshape(units, run.width, -1) for encoded in ordered]
    return np.concatenate(records, axis=2).reshape(units, run.unit_bytes)


def decode_part(part: Part, run: RunLayout, units: U8) -> F32:
    """Decode the vectors of one part from `[units, unit_bytes]` to float32 `[units * width, hidden]`.

    For an f32 part in the record layout the result is a view of `units` with a stride of one record.
    """
    offset, size = run.part_offset(part.name), part.vector_bytes(run.hidden)
    if run.layout == "record":
        records = units.reshape(len(units) * run.width, run.record_bytes)
        vectors = records[:, offset : offset + size]
        if not is_quantised(part.format):
            return _decode_plain(part.format, vectors)
        blocks = vectors.reshape(len(records), run.hidden // GROUP, GROUP_BYTES[part.format])
        return dequantise_groups(part.format, blocks)
    encoded = units[:, offset : offset + run.width * size]
    outputs, inputs = (run.width, run.hidden) if part.axis == "row" else (run.hidden, run.width)
    groups = _untile(part.format, np.ascontiguousarray(encoded), outputs, inputs)
    values = dequantise_groups(part.format, groups)
    if part.axis == "column":
        values = values.swapaxes(1, 2)
    return np.ascontiguousarray(values).reshape(len(units) * run.width, run.hidden)


def _encode_plain(format: Format, vectors: F32) -> U8:
    vectors = np.ascontiguousarray(vectors, np.float32)
    if format == "f32":
        return vectors.view(np.uint8)
    if format == "f16":
        with np.errstate(over="ignore"):  # infinity
            return vectors.astype(np.float16).view(np.uint8)
    bits = vectors.view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1)  # to nearest, ties to even
    rounded = np.where(np.isnan(vectors), bits | 0x400000, rounded)
    return (rounded >> 16).astype(np.uint16).view(np.uint8)


def _decode_plain(format: Format, vectors: U8) -> F32:
    if format == "f32":
        return vectors.view(np.float32)
    if format == "f16":
        return vectors.view(np.float16).astype(np.float32)
    return cast(F32, (vectors.view(np.uint16).astype(np.uint32) << 16).view(np.float32))


def _tile(format: Format, blocks: U8) -> U8:
    """Rearrange blocks `[units, outputs, input groups, block bytes]` into tiles `[units, part_bytes]`."""
    units, outputs, groups, size = blocks.shape
    code_bytes, each = CODE_BYTES[format], FACTOR_BYTES[format]
    factors = (size - code_bytes) // each
    tiles = (units, outputs // TILE_OUTPUTS, groups)
    by_tile = blocks.reshape(units, outputs // TILE_OUTPUTS, TILE_OUTPUTS, groups, size).swapaxes(2, 3)
    codes = by_tile[..., -code_bytes:].reshape(*tiles, TILE_OUTPUTS, code_bytes // 4, 4).swapaxes(3, 4)
    scales = by_tile[..., :-code_bytes].reshape(*tiles, TILE_OUTPUTS, factors, each).swapaxes(3, 4)
    ordered = [codes.reshape(*tiles, TILE_OUTPUTS * code_bytes), scales.reshape(*tiles, TILE_OUTPUTS * factors * each)]
    return np.concatenate(ordered, axis=-1).reshape(units, outputs * groups * size)


def _untile(format: Format, tiles: U8, outputs: int, inputs: int) -> U8:
    """Rearrange tiles `[units, part_bytes]` into blocks `[units, outputs, input groups, block bytes]`."""
    groups, size = inputs // GROUP, GROUP_BYTES[format]
    code_bytes, each = CODE_BYTES[format], FACTOR_BYTES[format]
    factors = (size - code_bytes) // each
    shape = (len(tiles), outputs // TILE_OUTPUTS, groups)
    tiles = tiles.reshape(*shape, TILE_OUTPUTS * size)
    codes = tiles[..., : TILE_OUTPUTS * code_bytes].reshape(*shape, code_bytes // 4, TILE_OUTPUTS, 4).swapaxes(3, 4)
    scales = tiles[..., TILE_OUTPUTS * code_bytes :].reshape(*shape, factors, TILE_OUTPUTS, each).swapaxes(3, 4)
    ordered = [
        scales.reshape(*shape, TILE_OUTPUTS, factors * each),
        codes.reshape(*shape, TILE_OUTPUTS, code_bytes),
    ]
    blocks = np.concatenate(ordered, axis=-1).swapaxes(2, 3)
    return cast(U8, blocks.reshape(len(tiles), outputs, groups, size))


def _whole_units(run: RunLayout, vectors: int) -> int:
    if vectors % run.width:
        raise ModelError(f"{vectors} vectors do not fill units of {run.width}; pad them with zeros")
    return vectors // run.width


def _require_record(part: Part, run: RunLayout) -> None:
    if run.layout != "record":
        raise ModelError(f"{part.name} in {part.format} needs the record layout")

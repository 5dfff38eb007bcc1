"""Packed units compared with GGUF's own quantiser, in both layouts."""

import gguf
import numpy as np
import pytest

from tpi.config import Format
from tpi.errors import ModelError
from tpi.pack.builder.quantise import assemble, decode_part, encode_gguf_part, encode_part, part_bytes
from tpi.pack.layout import Axis, Layout, Part, RunLayout

QUANTISED: list[Format] = ["q8", "q4", "q4s"]
TYPES: dict[str, Format] = {"Q8_0": "q8", "Q4_1": "q4", "Q4_0": "q4s"}
GGUF_FORMATS: dict[str, Format] = TYPES | {"MXFP4": "mxfp4"}

LAYOUTS = [("tiled", kind) for kind in GGUF_FORMATS] + [("record", kind) for kind in TYPES]  # MXFP4 is tiled alone


def run_of(layout: Layout, width: int, hidden: int, *parts: Part, units: int = 3) -> RunLayout:
    return RunLayout("neuron", layout, parts, width, hidden, units)


@pytest.mark.parametrize("layout", ["record", "tiled"])
@pytest.mark.parametrize("axis", ["row", "column"])
@pytest.mark.parametrize(("format", "step"), [("q8", 1 / 127), ("q4", 2 / 15), ("q4s", 1 / 7)])
def test_decoding_is_within_half_a_step(layout: Layout, axis: Axis, format: Format, step: float) -> None:
    part = Part("w", format, axis)
    run = run_of(layout, 32, 96, part)
    vectors = np.random.default_rng(1).uniform(-1, 1, (96, 96)).astype(np.float32)
    encoded = encode_part(part, run, vectors)
    assert encoded.shape == (3, part_bytes(part, run))
    error = np.abs(decode_part(part, run, encoded) - vectors)
    assert error.max() < step * 1.01
    assert np.sqrt(np.square(error).mean()) < step * 0.31


@pytest.mark.parametrize("layout", ["record", "tiled"])
@pytest.mark.parametrize("axis", ["row", "column"])
@pytest.mark.parametrize("format", QUANTISED)
def test_quantising_twice_changes_nothing(layout: Layout, axis: Axis, format: Format) -> None:
    part = Part("w", format, axis)
    run = run_of(layout, 64, 128, part)
    vectors = np.random.default_rng(2).normal(size=(192, 128)).astype(np.float32)
    once = decode_part(part, run, encode_part(part, run, vectors))
    twice = decode_part(part, run, encode_part(part, run, once))
    np.testing.assert_allclose(twice, once, atol=2e-3)


@pytest.mark.parametrize(("layout", "kind"), LAYOUTS)
def test_gguf_rows_import_bit_exactly(layout: Layout, kind: str) -> None:
    part = Part("w", GGUF_FORMATS[kind], "row")
    run = run_of(layout, 32, 96, part)
    values = np.random.default_rng(3).normal(size=(96, 96)).astype(np.float32)
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(decode_part(part, run, encode_gguf_part(part, run, blocks)), expected)


@pytest.mark.parametrize("kind", list(GGUF_FORMATS))
def test_gguf_columns_import_bit_exactly(kind: str) -> None:
    part = Part("w", GGUF_FORMATS[kind], "column")
    run = run_of("tiled", 64, 96, part)
    matrix = np.random.default_rng(4).normal(size=(96, 192)).astype(np.float32)  # [hidden, inputs]
    blocks = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType[kind])
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(decode_part(part, run, encode_gguf_part(part, run, blocks)), expected.T)


def test_gguf_columns_cannot_keep_their_groups_in_records() -> None:
    part = Part("w", "q8", "column")
    with pytest.raises(ModelError, match="record layout"):
        encode_gguf_part(part, run_of("record", 32, 96, part), np.zeros((96, 102), np.uint8))


@pytest.mark.parametrize("layout", ["record", "tiled"])
def test_parts_of_different_formats_share_a_unit(layout: Layout) -> None:
    parts = (Part("gate", "q8", "row"), Part("up", "q4", "row"), Part("down", "q4s", "column"))
    run = run_of(layout, 32, 64, *parts)
    random = np.random.default_rng(5)
    encoded = {part.name: encode_part(part, run, random.normal(size=(96, 64)).astype(np.float32)) for part in parts}
    units = assemble(run, encoded)
    assert units.shape == (3, run.unit_bytes)
    for part in parts:
        alone = RunLayout("neuron", layout, (part,), 32, 64, 3)
        np.testing.assert_array_equal(decode_part(part, run, units), decode_part(part, alone, encoded[part.name]))


@pytest.mark.parametrize(("format", "tolerance"), [("f32", 0.0), ("bf16", 2**-8)])
def test_plain_formats_in_records(format: Format, tolerance: float) -> None:
    part = Part("q", format, "row")
    run = run_of("record", 5, 19, part)
    vectors = np.random.default_rng(6).normal(size=(15, 19)).astype(np.float32)
    decoded = decode_part(part, run, encode_part(part, run, vectors))
    np.testing.assert_allclose(decoded, vectors, rtol=tolerance)


@pytest.mark.parametrize("format", QUANTISED)
def test_zeros_and_constants_survive(format: Format) -> None:
    part = Part("w", format, "row")
    run = run_of("tiled", 8, 64, part, units=1)
    vectors = np.zeros((8, 64), np.float32)
    vectors[3] = 0.5
    np.testing.assert_allclose(decode_part(part, run, encode_part(part, run, vectors)), vectors, atol=2e-4)


def test_no_units_is_not_an_error() -> None:
    part = Part("w", "q4", "row")
    run = run_of("tiled", 8, 64, part, units=0)
    encoded = encode_part(part, run, np.zeros((0, 64), np.float32))
    assert decode_part(part, run, encoded).shape == (0, 64)


def test_vectors_must_fill_units() -> None:
    part = Part("w", "q8", "row")
    with pytest.raises(ModelError, match="do not fill units"):
        encode_part(part, run_of("tiled", 8, 64, part), np.zeros((9, 64), np.float32))


def test_f32_is_refused_in_tiles() -> None:
    part = Part("w", "f32", "row")
    with pytest.raises(ModelError, match="record layout"):
        encode_part(part, run_of("tiled", 8, 64, part), np.zeros((8, 64), np.float32))

"""Every quantised GGUF type becomes groups of a pack with the values that gguf-py decodes."""

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, quants

from tpi.pack.builder.transcode import transcode
from tpi.pack.groups import CODE_BYTES, dequantise_groups, pack_codes, quantise_groups, unpack_codes
from tpi.pack.layout import GROUP, GROUP_BYTES
from tpi.sources.elements import GGML_TYPES, Element, decode

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
TYPES = [Element(name, group, size) for name, group, size in GGML_TYPES.values() if group > 1]
ROUNDED = {"Q4_K", "Q5_K", "IQ4_XS", "IQ3_XXS", "IQ3_S"}  # a scale is a product, rounded to f16
SCALES = {"Q6_K": [208], "Q3_K": [108], "Q2_K": [80, 82], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q4_1": [0, 2],
          "Q5_1": [0, 2], "TQ1_0": [52], "TQ2_0": [64]}  # fmt: skip
"""Where a block has f16 values; at 0 in other types. IQ1_M has one in the upper 4 bits of 4 words from byte 48 on."""


def random_blocks(element: Element) -> U8:
    """Return blocks `[3, bytes]` of random bytes with finite scales."""
    random, size = np.random.default_rng(1), element.group_bytes
    blocks = random.integers(0, 256, (3 * 2 * 256 // element.group, size), dtype=np.uint8)
    scales = random.uniform(0.001, 0.05, (len(blocks), 1)).astype(np.float16)
    if element.name == "MXFP4":
        blocks[:, 0] = 100 + blocks[:, 0] % 40
    elif element.name == "IQ1_M":
        words = blocks[:, 48:56].copy().view(np.uint16) & 0x0FFF
        words |= (scales.view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) & 15) << 12
        blocks[:, 48:56] = words.view(np.uint8)
    elif element.name == "TQ2_0":
        blocks[:, :64] = blocks[:, :64] & blocks[:, :64] << 1 & 0xAA | blocks[:, :64] & 0x55 & ~(blocks[:, :64] >> 1)
    elif element.name == "TQ1_0":
        values = random.integers(-1, 2, (len(blocks), 256)).astype(np.float32)
        blocks[...] = quants.quantize(values, GGMLQuantizationType.TQ1_0)
    if element.name not in ("MXFP4", "IQ1_M"):
        for at in SCALES.get(element.name, [0]):
            blocks[:, at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(3, -1)


def values_of(element: Element, raw: U8) -> F32:
    """Decode blocks with gguf-py, or a value at a time where it cannot; returns float32 `[rows, values]`."""
    if element.name not in ("Q1_0", "Q2_0"):
        return np.asarray(quants.dequantize(raw, GGMLQuantizationType[element.name]))
    values, bits = [], 1 if element.name == "Q1_0" else 2
    for block in raw.reshape(-1, element.group_bytes):
        whole = int.from_bytes(block[2:].tobytes(), "little")
        codes = [whole >> bits * at & (1 << bits) - 1 for at in range(element.group)]
        numbers = np.array([2 * code - 1 if bits == 1 else code - 1 for code in codes], np.float32)
        values.append(numbers * block[:2].copy().view(np.float16).astype(np.float32))
    return np.concatenate(values).reshape(len(raw), -1)


@pytest.mark.parametrize("element", TYPES, ids=lambda element: element.name)
def test_values_are_those_of_gguf(element: Element) -> None:
    raw = random_blocks(element)
    expected = values_of(element, raw)
    np.testing.assert_array_equal(decode(element, raw), expected)
    groups = transcode(element, raw).reshape(3, -1, GROUP_BYTES[element.nearest])
    found = dequantise_groups(element.nearest, groups)
    if element.name in ROUNDED:
        assert np.linalg.norm(found - expected) < 6e-4 * np.linalg.norm(expected)
    else:
        np.testing.assert_array_equal(found, expected)
    assert transcode(element, raw[:0]).shape == (0, groups[0].size)


@pytest.mark.parametrize("planes", [(4,), (4, 2), (4, 1), (2, 1), (2,)])
def test_planes_hold_every_code(planes: tuple[int, ...]) -> None:
    codes = np.random.default_rng(2).integers(0, 1 << sum(planes), (5, 7, GROUP), dtype=np.uint8)
    packed = pack_codes(planes, codes)
    assert packed.shape == (5, 7, 4 * sum(planes))
    np.testing.assert_array_equal(unpack_codes(planes, packed), codes)


@pytest.mark.parametrize(
    ("format", "error"),
    [("q6", 0.02), ("q5", 0.04), ("q3", 0.16), ("q2", 0.35), ("iq4", 0.09), ("iq3s", 0.1), ("iq3", 0.1),
     ("iq2", 0.25), ("iq1", 0.35), ("nvfp4", 0.12)],
)  # fmt: skip
def test_floats_are_quantised_closely(format: str, error: float) -> None:
    values = np.random.default_rng(3).normal(size=(8, 256)).astype(np.float32)
    blocks = quantise_groups(format, values)  # type: ignore[arg-type]
    assert blocks.shape == (8, 8, GROUP_BYTES[format])  # type: ignore[index]
    found = dequantise_groups(format, blocks)  # type: ignore[arg-type]
    assert np.linalg.norm(found - values) < error * np.linalg.norm(values)
    zeros = dequantise_groups(format, quantise_groups(format, values * 0))  # type: ignore[arg-type]
    np.testing.assert_array_equal(zeros, 0)


def test_a_block_is_its_factors_and_codes() -> None:
    assert {name: GROUP_BYTES[name] - size for name, size in CODE_BYTES.items()} == {
        "q8": 2, "q4": 4, "q4s": 2, "mxfp4": 1, "q6": 4, "q5": 4, "q3": 4, "q2": 6, "iq4": 2, "iq3s": 2, "iq3": 2,
        "iq2": 4, "iq1": 4, "nvfp4": 4,
    }  # fmt: skip

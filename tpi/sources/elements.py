"""Codings of the values in a source's tensors, and their decoding to exact float32 values."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tpi.config import Format
from tpi.errors import ModelError
from tpi.sources.quantised.groups import DEQUANTISED, FORMATS, decode_groups

# GGML type number to (name, values in a group, bytes of a group). From the GGUF specification and ggml's type table.
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip

# The pack format for a coding. It keeps the codes of every quantised type of GGUF (`tpi.pack.builder.transcode`).
_NEAREST: dict[str, Format] = {
    "F32": "f32", "F16": "f16", "BF16": "bf16", "Q4_0": "q4s", "Q4_1": "q4", "Q8_0": "q8", "MXFP4": "mxfp4",
    "Q4_K": "q4", "Q5_0": "q5", "Q5_1": "q5", "Q5_K": "q5", "Q6_K": "q6", "Q3_K": "q3", "Q2_K": "q2", "TQ1_0": "q2",
    "TQ2_0": "q2", "IQ4_NL": "iq4", "IQ4_XS": "iq4", "IQ3_S": "iq3s", "IQ3_XXS": "iq3", "IQ2_XXS": "iq2",
    "IQ2_XS": "iq2", "IQ2_S": "iq2", "IQ1_S": "iq1", "IQ1_M": "iq1", "Q1_0": "q2", "Q2_0": "q2",
    "FP8": "q8",
}  # fmt: skip
_NEAREST |= FORMATS

# Types that the gguf package does not decode: the number that each code stands for. A value is number times scale.
_FEW_BITS = {"Q1_0": (-1, 1), "Q2_0": (-1, 0, 1, 2)}


@dataclass(frozen=True)
class Element:
    """A coding of values in groups.

    Its name is that of safetensors or GGML, such as BF16 or Q4_0, or a kind of `tpi.sources.quantised.groups`.
    """

    name: str
    group: int  # values in a group; 1 if each value stands alone
    group_bytes: int

    def row_bytes(self, values: int) -> int:
        """Return the bytes that `values` consecutive values take; `values` must be a multiple of the group."""
        return values // self.group * self.group_bytes

    @property
    def nearest(self) -> Format:
        """The pack format for `--dtype auto`, which keeps the codes; f32 for a coding that is not supported."""
        if self.name.endswith(DEQUANTISED):
            return "q8"
        return _NEAREST.get(self.name, "f32")

    @property
    def quantised(self) -> bool:
        """True if values are stored in groups with scales."""
        return self.group > 1

    @property
    def rounded(self) -> bool:
        """True if the values were quantised, in groups or (FP8) one by one, and so have fewer bits than floats."""
        return self.quantised or self.name == "FP8" or self.name.endswith(DEQUANTISED)


def decode(element: Element, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Decode `raw`, uint8 `[rows, bytes]`, to its exact values, float32 `[rows, values]`.

    Raises:
        ModelError: if weights in this coding are not supported, for example I64 or F64.
    """
    if element.name in ("F32", "FP8") or element.name.endswith(DEQUANTISED):
        return raw.view("<f4").astype(np.float32, copy=False)
    if element.name == "F16":
        return raw.view("<f2").astype(np.float32)
    if element.name == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if not raw.size:
        return np.zeros((len(raw), raw.shape[1] // element.group_bytes * element.group), np.float32)
    if not element.quantised:
        raise ModelError(f"weights of type {element.name} are not supported; convert them to F32, F16 or BF16")
    if element.name in FORMATS:
        return decode_groups(element.name, raw)
    if element.name in _FEW_BITS:
        return _decode_few_bits(element, raw)
    from gguf import GGMLQuantizationType, quants

    values: npt.NDArray[np.float32] = quants.dequantize(raw, GGMLQuantizationType[element.name])
    return values


def _decode_few_bits(element: Element, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Decode blocks of an f16 scale and codes of 1 or 2 bits, the lowest bits of a byte first.

    From `dequantize_row_q1_0` and `dequantize_row_q2_0` of ggml. Shapes are those of `decode`.
    """
    blocks = np.ascontiguousarray(raw).reshape(-1, element.group_bytes)
    numbers = np.array(_FEW_BITS[element.name], np.float32)
    shifts = np.arange(0, 8, len(numbers) // 2, dtype=np.uint8)
    codes = blocks[:, 2:, None] >> shifts & np.uint8(len(numbers) - 1)
    scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    values = numbers[codes].reshape(len(blocks), -1) * scales
    return np.asarray(values.reshape(len(raw), -1), np.float32)

"""Groups of 32 codes with their factors: the form in which readers of quantised safetensors pass weights on.

A group is 40 bytes: two float32 factors, then 32 codes of a byte each. Its kind says what a value is:

- INTn, UINTn: `(code - zero) * scale`; the factors are the scale and the zero. For INTn the zero is 2^(n - 1).
- LINEn: `code * scale + minimum`; the factors are the scale and the minimum.
- NVFP4: `e2m1[code] * scale`; the factors are the scales of the two halves.

Weights that do not form such groups are decoded to float32 when they are read. Their kind ends in ` dequantised`.
"""

from typing import cast

import numpy as np
import numpy.typing as npt

from tpi.config import Format

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

GROUP = 32
GROUP_BYTES = 2 * 4 + GROUP
DEQUANTISED = " dequantised"
NVFP4 = "NVFP4"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

# The pack format that keeps the codes of a kind.
FORMATS: dict[str, Format] = {
    "INT2": "q2", "INT3": "q3", "INT4": "q4s", "INT5": "q5", "INT6": "q6", "INT7": "q8", "INT8": "q8",
    "UINT2": "q2", "UINT3": "q4", "UINT4": "q4", "UINT5": "q5", "UINT6": "q8", "UINT7": "q8",
    "LINE2": "q4", "LINE3": "q4", "LINE4": "q4", "LINE5": "q5", NVFP4: "nvfp4",
}  # fmt: skip


def join_groups(first: F32, second: F32, codes: U8) -> U8:
    """Join factors, each float32 `[rows, groups]`, and codes `[rows, groups * 32]` to `[rows, groups * 40]` bytes."""
    factors = np.stack([first, second], axis=-1).astype("<f4", copy=False).view(np.uint8)
    return np.concatenate([factors, codes.reshape(*first.shape, GROUP)], axis=-1).reshape(len(codes), -1)


def split_groups(raw: U8) -> tuple[F32, F32, U8]:
    """Return both factors, `[rows, groups, 1]`, and the codes, `[rows, groups, 32]`, of `[rows, groups * 40]` bytes."""
    groups = raw.reshape(len(raw), raw.shape[1] // GROUP_BYTES, GROUP_BYTES)
    factors = np.ascontiguousarray(groups[..., :8]).view("<f4").astype(np.float32, copy=False)
    return factors[..., :1], factors[..., 1:], groups[..., 8:]


def decode_groups(kind: str, raw: U8) -> F32:
    """Decode groups, `[rows, groups * 40]` bytes, to their exact values, float32 `[rows, groups * 32]`."""
    first, second, codes = split_groups(raw)
    if kind == NVFP4:
        values = E2M1[codes] * np.repeat(np.concatenate([first, second], axis=-1), GROUP // 2, axis=-1)
    else:
        values = value_of(kind, codes, first, second)
    return cast(F32, values.reshape(len(raw), -1))


def value_of(kind: str, codes: U8, scale: F32, offset: F32) -> F32:
    """Return the float32 values of integer codes of this kind; the shapes are broadcast.

    `scale` and `offset` are the two factors of a group.
    """
    if kind.startswith("LINE"):
        return cast(F32, codes * scale + offset)
    return cast(F32, (codes.astype(np.float32) - offset) * scale)

"""FP8 weights of safetensors files: e4m3 codes in a tensor `x`, and their scales in another.

The scales are `x_scale_inv` (DeepSeek's and Qwen's files) or `x_scale` (compressed-tensors). In both, a weight is its
code times its scale. There is one scale for the tensor, for each row, or for each block of `weight_block_size`. This
module presents both tensors as one, `x`, whose values are these products in float32. Scales of activations are left
out: TPI rounds activations in its own way.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tpi.errors import ModelError
from tpi.sources.base import Bytes, Source, SourceTensor
from tpi.sources.elements import Element, decode

FP8 = Element("FP8", 1, 4)  # decoded to float32 when it is read
_SCALES = ("_scale_inv", "_scale")
ACTIVATIONS = (".input_scale", ".activation_scale", ".k_scale", ".v_scale", ".input_global_scale", ".input_zero_point")
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Fp8Scales:
    """Number of rows and columns of a model's FP8 weights that share one scale.

    `block` is (0, 0) if the scales are not those of such blocks.
    """

    block: tuple[int, int] = (0, 0)

    @classmethod
    def of_block(cls, block: object = None) -> "Fp8Scales":
        """Return the layout for a block of a configuration, a list of two sizes; None: there are no blocks.

        Raises:
            ModelError: if `block` is neither.
        """
        if block is None:
            return cls()
        if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
            raise ModelError(f"its FP8 weights have blocks of {str(block)[:80]}; two sizes are expected")
        return cls((block[0], block[1]))


def apply_scales(source: Source, scales: Fp8Scales) -> Source:
    """Return `source` with each pair of FP8 codes and scales joined into one tensor.

    Raises:
        ModelError: if FP8 codes have no scales, or scales of a shape that does not fit; the message names the tensor.
    """
    found = {
        name: _scale_of(source, tensor, scales)
        for name, tensor in source.tensors.items()
        if tensor.element.name == "F8_E4M3"
    }
    return _Fp8Source(source, found, scales)


def _scale_of(source: Source, codes: SourceTensor, scales: Fp8Scales) -> SourceTensor:
    name = next((codes.name + suffix for suffix in _SCALES if codes.name + suffix in source.tensors), None)
    if name is None:
        raise ModelError(f"{source.label}: tensor {codes.name} is in FP8, but has no scales; download the model again")
    tensor = source.tensors[name]
    if tensor.rows * tensor.columns == 1 or _by_rows(codes, tensor):
        return tensor
    if len(codes.shape) >= 2 and all(scales.block):
        rows, columns = (-(-size // block) for size, block in zip(codes.shape[-2:], scales.block, strict=True))
        if tensor.shape == (*codes.shape[:-2], rows, columns):
            return tensor
    raise ModelError(
        f"{source.label}: tensor {codes.name} has shape {list(codes.shape)}, but its scales have shape "
        f"{list(tensor.shape)}, which does not fit; download the model again"
    )


def _by_rows(codes: SourceTensor, scales: SourceTensor) -> bool:
    """Return True if each row of `codes` has a scale of its own."""
    return scales.shape in (codes.shape[:-1], (*codes.shape[:-1], 1))


class _Fp8Source:
    """A `Source` that returns the values of FP8 tensors. `scales` has the tensor of scales of each FP8 tensor."""

    def __init__(self, source: Source, scales: Mapping[str, SourceTensor], layout: Fp8Scales) -> None:
        used = {tensor.name for tensor in scales.values()}
        self.label = source.label
        self.tensors: Mapping[str, SourceTensor] = {
            name: replace(tensor, element=FP8) if name in scales else tensor
            for name, tensor in source.tensors.items()
            if name not in used and not name.endswith(ACTIVATIONS)
        }
        self._source, self._scales, self._layout = source, scales, layout

    def read(self, tensor: SourceTensor, rows: tuple[int, int], columns: tuple[int, int]) -> Bytes:
        """Return the bytes of a rectangle of `tensor`, uint8 `[rows, bytes]`. FP8 weights are returned as float32."""
        if tensor.name not in self._scales:
            return self._source.read(tensor, rows, columns)
        codes = self._source.read(self._source.tensors[tensor.name], rows, columns)
        return np.ascontiguousarray(E4M3[codes] * self._factors(tensor, rows, columns)).view(np.uint8)

    def close(self) -> None:
        self._source.close()

    def _factors(self, tensor: SourceTensor, rows: tuple[int, int], columns: tuple[int, int]) -> F32:
        """Return the scales of a rectangle of `tensor`, float32 `[rows, columns]`.

        An axis along which all scales are equal has size 1.
        """
        stored = self._scales[tensor.name]
        size = stored.rows * stored.columns
        if size == 1 or _by_rows(tensor, stored):
            flat = replace(stored, shape=(size, 1))
            return decode(stored.element, self._source.read(flat, rows if size > 1 else (0, 1), (0, 1)))
        high, wide = self._layout.block
        each, stacked = tensor.shape[-2], np.arange(*rows)
        of_rows = stacked // each * stored.shape[-2] + stacked % each // high
        first = int(of_rows[0]) if len(of_rows) else 0
        last = int(of_rows[-1]) + 1 if len(of_rows) else 0
        found = decode(stored.element, self._source.read(stored, (first, last), (0, stored.columns)))
        factors: F32 = found[of_rows - first][:, np.arange(*columns) // wide]
        return factors


def _e4m3() -> F32:
    """Return the value of each of the 256 FP8 codes: a sign, 4 bits of exponent (bias 7), and 3 bits of mantissa.

    The format has no infinities.
    """
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent > 0, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    values = np.where(codes & 127 == 127, np.nan, values)
    return np.where(codes < 128, values, -values).astype(np.float32)


E4M3 = _e4m3()

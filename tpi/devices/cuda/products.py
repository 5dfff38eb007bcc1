"""Launches of two kinds of Triton kernels: products of activations with packed weights, and dequantisation.

This module chooses the kernel and the block sizes.
"""

from functools import lru_cache
from typing import Any

import torch

from tpi.devices.cuda.activations import Activations
from tpi.devices.cuda.backend import Tensor, launch, power
from tpi.devices.cuda.matrix import PackedMatrix
from tpi.devices.cuda.programs import few, many
from tpi.pack.layout import GROUP

FEW = 16  # from this number of tokens on, programs that compute tiles of tokens x outputs are faster
_SPLIT = 128  # columns that one program adds up
_TOKENS, _OUTPUTS = 32, 64  # tokens and outputs of a tile
_WORDS = {"q8", "q4", "q4s"}  # formats whose codes are read by words of four bytes
_GROUPS, _WARPS = 32, 4  # groups that a program of one or two tokens reads at once, and its warps (fastest on an H100)
INT8_FROM = (8, 0)  # compute capability from which on Triton multiplies int8 on tensor cores


def multiply(data: Tensor, weights: PackedMatrix, x: Activations, index: Tensor | None = None) -> Tensor:
    """Return `x`, `[tokens, inputs]`, times packed weights: `[tokens, outputs]` float32.

    `index`, int32, lists the vectors to use, in this order (record layout, or rows); None: all of them.
    """
    outputs, inputs = _sizes(weights, index)
    if not (x.tokens and outputs and inputs):
        return x.values.new_zeros(x.tokens, outputs)
    if weights.grouped:
        return (_few_grouped if x.tokens < FEW else _many_grouped)(data, weights, x, index)
    if x.tokens >= FEW:
        return _many_plain(data, weights, x.values, index)
    return (_few_columns if weights.column else _few_rows)(data, weights, x.values, index)


def decode(data: Tensor, weights: PackedMatrix, index: Tensor | None = None) -> Tensor:
    """Return vectors as float32, `[vectors, length]`; `index` lists the vectors, in this order (None: all)."""
    vectors = weights.vectors if index is None else len(index)
    out = torch.empty(vectors, weights.length, dtype=torch.float32, device=data.device)
    across = weights.tiled and weights.column  # squares are in the order of outputs
    count, length = (weights.length, weights.vectors) if across else (vectors, weights.length)
    groups = -(-length // GROUP)
    strides = (1, weights.length) if across else (weights.length, 1)
    launch(
        many.decode, (-(-count // 8), -(-groups // 4)), data, _or(index, data), out, count, groups, length,
        *_place(weights), *strides, VECTORS=8, TILED=weights.tiled, INDEXED=index is not None, **weights.constants,
    )  # fmt: skip
    return out


def _few_grouped(data: Tensor, weights: PackedMatrix, x: Activations, index: Tensor | None) -> Tensor:
    outputs, inputs = _sizes(weights, index)
    rounded, out, tokens = x.rounded(weights.format == "q8"), x.values.new_empty(x.tokens, outputs), power(x.tokens)
    if weights.tiled and weights.format in _WORDS:
        launch(
            few.few_words, (-(-outputs // 8),), data, rounded.codes, _or(rounded.rest, rounded.codes), rounded.scales,
            _or(index, data), out, x.tokens, outputs, inputs // GROUP, *_place(weights), TOKENS=tokens, OUTPUTS=8,
            GROUPS=_GROUPS if tokens <= 2 else _GROUPS // 2, INDEXED=index is not None, num_warps=_WARPS,
            **weights.constants,
        )  # fmt: skip
        return out
    launch(
        few.few_grouped, (-(-outputs // 8),), data, rounded.codes, _or(rounded.rest, rounded.codes), rounded.scales,
        _or(index, data), out, x.tokens, outputs, inputs // GROUP, *_place(weights), TOKENS=tokens, OUTPUTS=8,
        GROUPS=max(2, 16 // tokens), TILED=weights.tiled, INDEXED=index is not None, **weights.constants,
    )  # fmt: skip
    return out


def _many_grouped(data: Tensor, weights: PackedMatrix, x: Activations, index: Tensor | None) -> Tensor:
    outputs, inputs = _sizes(weights, index)
    rounded, out = x.rounded(weights.format == "q8"), x.values.new_empty(x.tokens, outputs)
    launch(
        many.many_grouped, _squares(x.tokens, outputs), data, rounded.codes, _or(rounded.rest, rounded.codes),
        rounded.scales, _or(index, data), out, x.tokens, outputs, inputs // GROUP, *_place(weights), TOKENS=_TOKENS,
        OUTPUTS=_OUTPUTS, TILED=weights.tiled, INDEXED=index is not None, INT8=_multiplies_int8(data.device),
        **weights.constants,
    )  # fmt: skip
    return out


def _many_plain(data: Tensor, weights: PackedMatrix, x: Tensor, index: Tensor | None) -> Tensor:
    outputs, inputs = _sizes(weights, index)
    out = x.new_empty(len(x), outputs)
    launch(
        many.many_plain, _squares(len(x), outputs), data, x, _or(index, data), out, len(x), inputs, outputs,
        weights.length, weights.offset, weights.unit, TOKENS=_TOKENS, OUTPUTS=_OUTPUTS, COLUMNS=weights.column,
        INDEXED=index is not None, **weights.constants,
    )  # fmt: skip
    return out


def _few_rows(data: Tensor, weights: PackedMatrix, x: Tensor, index: Tensor | None) -> Tensor:
    outputs, inputs = _sizes(weights, index)
    out, tokens = x.new_empty(len(x), outputs), power(len(x))
    launch(
        few.few_rows, (-(-outputs // 4),), data, x, _or(index, data), out, len(x), outputs, -(-inputs // GROUP), inputs,
        weights.offset, weights.unit, TOKENS=tokens, OUTPUTS=4, GROUPS=max(2, 16 // tokens), FORMAT=weights.format,
        INDEXED=index is not None,
    )  # fmt: skip
    return out


def _few_columns(data: Tensor, weights: PackedMatrix, x: Tensor, index: Tensor | None) -> Tensor:
    outputs, inputs = _sizes(weights, index)
    splits, groups, tokens = -(-inputs // _SPLIT), -(-outputs // GROUP), power(len(x))
    parts = x.new_empty(splits, len(x), outputs)
    launch(
        few.few_columns, (-(-groups // 4), splits), data, x, _or(index, data), parts, len(x), inputs, _SPLIT, groups,
        outputs, weights.offset, weights.unit, TOKENS=tokens, VECTORS=max(2, 16 // tokens), GROUPS=4, INDEXED=index is
        not None, **weights.constants,
    )  # fmt: skip
    return parts.sum(0)


@lru_cache
def _multiplies_int8(device: Any) -> bool:
    """Return True if Triton multiplies int8 on the tensor cores of `device`; otherwise float16 gives the same sums."""
    return bool(device.type != "cuda" or torch.cuda.get_device_capability(device) >= INT8_FROM)


def _sizes(weights: PackedMatrix, index: Tensor | None) -> tuple[int, int]:
    """Return the numbers of outputs and of inputs of a product with the vectors of `index`."""
    if index is None:
        return weights.outputs, weights.inputs
    return (weights.length, len(index)) if weights.column else (len(index), weights.length)


def _place(weights: PackedMatrix) -> tuple[int, int, int, int]:
    return weights.offset, weights.unit, weights.tall, weights.deep


def _squares(tokens: int, outputs: int) -> tuple[int, int]:
    return -(-tokens // _TOKENS), -(-outputs // _OUTPUTS)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return `tensor` or, if it is None, `other`, which the kernel does not read."""
    return other if tensor is None else tensor

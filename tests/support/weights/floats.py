"""A source of weights that are numpy arrays, and a way to take a quantised model off its grid without changing it.

A model from a 4-bit file can be packed in 4 bits again almost without loss, which proves nothing. Another order of
hidden dimensions, of neurons, and of the dimensions of each value head gives the same function. But groups of 32
weights then hold values from 32 different groups, as if they had never been quantised.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tpi.pack.builder.build import OpenedSource, open_source
from tpi.sources.base import Bytes, Source, SourceTensor
from tpi.sources.elements import Element, decode

F32 = npt.NDArray[np.float32]
Order = npt.NDArray[np.intp]


class ArraySource:
    """A `tpi.sources.base.Source` of float32 arrays in memory."""

    def __init__(self, label: str, arrays: Mapping[str, F32]) -> None:
        self.label = label
        self.tensors: Mapping[str, SourceTensor] = {
            name: SourceTensor(name, array.shape, Element("F32", 1, 4), Path(label), 0)
            for name, array in arrays.items()
        }
        self.arrays = arrays

    def read(self, tensor: SourceTensor, rows: tuple[int, int], columns: tuple[int, int]) -> Bytes:
        """Return rows and columns of a tensor, as `Source.read` specifies."""
        array = self.arrays[tensor.name].reshape(tensor.rows, tensor.columns)
        return np.ascontiguousarray(array[slice(*rows), slice(*columns)]).view(np.uint8)

    def close(self) -> None:
        """Do nothing: no file is open."""


def as_floats(path: Path) -> OpenedSource:
    """Return the GGUF model at `path` as a source of float32 weights."""
    opened = open_source(path)
    arrays = {name: _values(opened.source, tensor) for name, tensor in opened.source.tensors.items()}
    return replace(opened, source=ArraySource(f"{path.stem} in float32", arrays))


def shuffled(path: Path, seed: int = 0) -> OpenedSource:
    """Return the Llama-like GGUF model at `path` in float32, reordered so that it is off its quantisation grid."""
    opened = as_floats(path)
    config, random = opened.model.config, np.random.default_rng(seed)
    assert isinstance(opened.source, ArraySource)
    arrays = dict(opened.source.arrays)
    hidden = random.permutation(config.hidden)
    for layer in range(config.layers):
        neurons = random.permutation(config.intermediate)
        within = random.permutation(config.head_dim)
        kv_rows, query_rows = _heads(within, config.kv_heads), _heads(within, config.heads)
        orders = {
            "attn_norm": (hidden,), "attn_q": (None, hidden), "attn_k": (None, hidden), "attn_v": (kv_rows, hidden),
            "attn_output": (hidden, query_rows), "ffn_norm": (hidden,), "ffn_gate": (neurons, hidden),
            "ffn_up": (neurons, hidden), "ffn_down": (hidden, neurons),
        }  # fmt: skip
        for name, order in orders.items():
            key = f"blk.{layer}.{name}.weight"
            arrays[key] = _reordered(arrays[key], order)
    for name in ("token_embd.weight", "output_norm.weight", "output.weight"):
        if name in arrays:
            arrays[name] = np.ascontiguousarray(arrays[name][..., hidden])
    return replace(opened, source=ArraySource(f"shuffled {path.stem}", arrays))


def _values(source: Source, tensor: SourceTensor) -> F32:
    raw = source.read(tensor, (0, tensor.rows), (0, tensor.columns))
    return decode(tensor.element, raw).reshape(tensor.shape)


def _heads(within: Order, heads: int) -> Order:
    """Return indices that reorder values by `within` in each of `heads` heads."""
    return np.asarray(np.arange(heads)[:, None] * len(within) + within).reshape(-1)


def _reordered(array: F32, order: tuple[Order | None, ...]) -> F32:
    for axis, indices in enumerate(order):
        if indices is not None:
            array = np.take(array, indices, axis)
    return np.ascontiguousarray(array)

"""MXFP4 weights of safetensors files, which keep the codes of a matrix in one tensor and their scales in another.

`x_blocks` is `[..., rows, groups, 16]` bytes: byte j of a group has value 2j in its low half and value 2j + 1 in its
high half. `x_scales` is `[..., rows, groups]` bytes. This module presents both as one tensor `x_blocks` in GGUF's
coding: each group is the scale, then 16 bytes, of which byte j has values j and j + 16 (`tpi.pack.groups`). The values
do not change.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from tpi.errors import ModelError
from tpi.sources.base import Bytes, Source, SourceTensor
from tpi.sources.elements import Element

BLOCKS, _SCALES = "_blocks", "_scales"
MXFP4 = Element("MXFP4", 32, 17)
_CODES = 16  # bytes of the codes of a group


def join_scales(source: Source) -> Source:
    """Return `source` with each pair of blocks and scales joined into one tensor; `source` itself if it has none.

    Raises:
        ModelError: if the shape of a tensor of scales does not fit its blocks.
    """
    found = {tensor.name: tensor for tensor in _joined(source)}
    return _MicroscaledSource(source, found) if found else source


def _joined(source: Source) -> Iterator[SourceTensor]:
    for name, blocks in source.tensors.items():
        scales = source.tensors.get(name.removesuffix(BLOCKS) + _SCALES) if name.endswith(BLOCKS) else None
        if scales is None:
            continue
        bytes_each = (blocks.element.group_bytes, scales.element.group_bytes)
        if blocks.shape != (*scales.shape, _CODES) or len(scales.shape) < 2 or bytes_each != (1, 1):
            raise ModelError(
                f"{source.label}: tensor {name} has shape {list(blocks.shape)}, but its scales have shape "
                f"{list(scales.shape)}, which does not fit; download the model again"
            )
        yield replace(blocks, shape=(*scales.shape[:-1], scales.shape[-1] * MXFP4.group), element=MXFP4)


class _MicroscaledSource:
    """A `Source` in which each tensor of `joined` replaces its blocks and its scales."""

    def __init__(self, source: Source, joined: dict[str, SourceTensor]) -> None:
        scales = {name.removesuffix(BLOCKS) + _SCALES for name in joined}
        others = {name: tensor for name, tensor in source.tensors.items() if name not in scales}
        self.label = source.label
        self.tensors: Mapping[str, SourceTensor] = others | joined
        self._source, self._joined = source, joined

    def read(self, tensor: SourceTensor, rows: tuple[int, int], columns: tuple[int, int]) -> Bytes:
        """Return the bytes of a rectangle of `tensor`, uint8 `[rows, bytes]`, in GGUF's coding if it is joined."""
        if tensor.name not in self._joined:
            return self._source.read(tensor, rows, columns)
        first, last = (column // MXFP4.group for column in columns)
        blocks = self._read(tensor.name, _CODES, rows, (first, last))
        scales = self._read(tensor.name.removesuffix(BLOCKS) + _SCALES, 1, rows, (first, last))
        codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape[:2], 2, _CODES)
        groups = np.concatenate([scales, codes[:, :, 0] | codes[:, :, 1] << np.uint8(4)], axis=-1)
        return groups.reshape(len(groups), -1)

    def close(self) -> None:
        """Close the source that this one wraps."""
        self._source.close()

    def _read(self, name: str, size: int, rows: tuple[int, int], groups: tuple[int, int]) -> Bytes:
        """Read some groups of some rows of a stored tensor with `size` bytes a group: uint8 `[rows, groups, size]`."""
        stored = self._source.tensors[name]
        row_bytes = self._joined_groups(name) * size
        flat = replace(stored, shape=(stored.rows * stored.columns // row_bytes, row_bytes))
        found = self._source.read(flat, rows, (groups[0] * size, groups[1] * size))
        return found.reshape(rows[1] - rows[0], groups[1] - groups[0], size)

    def _joined_groups(self, name: str) -> int:
        """Return the number of groups in a row of the joined tensor that the stored tensor `name` is part of."""
        return self._joined[name.removesuffix(_SCALES).removesuffix(BLOCKS) + BLOCKS].columns // MXFP4.group

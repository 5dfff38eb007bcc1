"""Heads that a tensor has in another order than a pack: any order, by rows, by columns, or transposed."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tpi.sources.base import SourceTensor
from tpi.sources.elements import Element
from tpi.sources.heads import HeadOrder, read_columns, read_rows, read_transposed


class Memory:
    """A source with one tensor in memory."""

    label = "memory"

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.tensor = SourceTensor("x", values.shape, Element("F32", 1, 4), Path("x"), 0)
        self.tensors: Mapping[str, SourceTensor] = {"x": self.tensor}

    def read(self, tensor: SourceTensor, rows: tuple[int, int], columns: tuple[int, int]) -> np.ndarray:
        flat = self.values.reshape(-1, self.values.shape[-1])
        return np.ascontiguousarray(flat[slice(*rows), slice(*columns)]).view(np.uint8)

    def close(self) -> None:
        """Do nothing: no file is open."""


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 7), st.integers(1, 6))
def test_heads_come_in_any_order(data: st.DataObject, heads: int, size: int, other: int) -> None:
    order = tuple(data.draw(st.lists(st.integers(-1, size - 1), min_size=1, max_size=9)))
    first = data.draw(st.integers(0, heads - 1))
    wanted = range(first, data.draw(st.integers(first + 1, heads)))
    values = np.arange(1, heads * size * other + 1, dtype=np.float32).reshape(heads, size, other)
    padded = np.concatenate([values, np.zeros((heads, 1, other), np.float32)], axis=1)  # the vector -1
    expected = padded[wanted.start : wanted.stop][:, order].reshape(-1, other)
    how = HeadOrder(size, order)
    by_rows = Memory(values.reshape(-1, other))
    np.testing.assert_array_equal(read_rows(by_rows, by_rows.tensor, how, wanted).view(np.float32), expected)
    by_columns = Memory(values.reshape(-1, other).T.copy())
    found, element = read_columns(by_columns, by_columns.tensor, how, wanted)
    assert element.name == "F32"
    np.testing.assert_array_equal(found.view(np.float32).T, expected)
    turned = Memory(values.swapaxes(1, 2).copy())
    np.testing.assert_array_equal(read_transposed(turned, turned.tensor, how, wanted)[0].view(np.float32), expected)


def test_whole_groups_stay_groups() -> None:
    assert HeadOrder(64, (*range(32, 64), *(-1 for _ in range(32)))).in_groups(32) == HeadOrder(2, (1, -1))
    assert HeadOrder(64, (*range(1, 33), *range(32))).in_groups(32) is None
    assert HeadOrder(48, tuple(range(32))).in_groups(32) is None
    assert HeadOrder.from_interleaved(6).order == (0, 2, 4, 1, 3, 5)

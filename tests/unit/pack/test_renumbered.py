"""A pack of a model whose neurons were renumbered: its records are in the new order, and it computes the same."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from tests.support.models import TinyModel, forward
from tests.support.weights.packs import part
from tpi.errors import ModelError
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.builder.renumber import renumbered_model
from tpi.pack.reader import Pack
from tpi.sources.base import SourceTensor
from tpi.sources.elements import Element
from tpi.sources.permuted import Permutation, PermutedSource

TOKENS = [1, 5, 9, 200, 17]
Tiny = Callable[[str], TinyModel]


@pytest.mark.parametrize(("name", "dtype"), [("llama", "f32"), ("opt", "f32"), ("opt", "q8")])
def test_a_renumbered_pack_equals_the_original(tiny_model: Tiny, tmp_path: Path, name: str, dtype: str) -> None:
    """OPT has biases, no gate, and records whose scales are their own; tiles share theirs among neurons."""
    directory, random = tiny_model(name).directory, np.random.default_rng(0)
    config = open_source(directory).model.config
    orders = {
        layer: random.permutation(config.intermediate).astype(np.int32) for layer in range(config.layers) if layer
    }
    pack_model(open_source(directory), dtype, tmp_path / "old")
    pack_model(renumbered_model(open_source(directory), orders), dtype, tmp_path / "new")
    old, new = Pack.open(tmp_path / "old"), Pack.open(tmp_path / "new")
    for layer in range(config.layers):
        order = orders.get(layer, np.arange(config.intermediate))
        for word in ("up", "down"):
            before, after = (part(pack.layers[layer][1], "neuron", word) for pack in (old, new))
            assert (after[: config.intermediate] == before[order]).all()
    expected, found = forward(old, TOKENS), forward(new, TOKENS)
    assert not all((order == np.arange(len(order))).all() for order in orders.values())
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()


def test_what_is_no_permutation_is_refused(tiny_model: Tiny) -> None:
    opened = open_source(tiny_model("llama").directory)
    with pytest.raises(ModelError, match="no permutation"):
        renumbered_model(opened, {0: np.zeros(opened.model.config.intermediate, np.int32)})
    opened.source.close()


def test_columns_that_share_scales_are_refused() -> None:
    class Quantised:
        label: ClassVar = "a model"
        tensors: ClassVar = {"down": SourceTensor("down", (4, 32), Element("Q8_0", 32, 34), Path("model"), 0)}

        def read(self, tensor: SourceTensor, rows: tuple[int, int], columns: tuple[int, int]) -> object:
            raise AssertionError(tensor)

        def close(self) -> None:
            """Nothing is open."""

    with pytest.raises(ModelError, match="share scales"):
        PermutedSource(Quantised(), {"down": Permutation("column", np.arange(32, dtype=np.int32))})  # type: ignore[arg-type]

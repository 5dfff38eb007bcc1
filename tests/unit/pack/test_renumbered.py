"""A renumbered pack has the records of the original in the new order, and computes the same."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.models import TinyModel, forward
from tests.support.weights.packs import part
from tpi.errors import ModelError, WeightsError
from tpi.pack.builder import renumber
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.builder.renumber import I32, write_renumbered
from tpi.pack.reader import Pack

TOKENS = [1, 5, 9, 200, 17]
Tiny = Callable[[str], TinyModel]


def packed(tiny_model: Tiny, path: Path, name: str = "opt", dtype: str = "q8") -> Pack:
    pack_model(open_source(tiny_model(name).directory), dtype, path / "old")
    return Pack.open(path / "old")


def drawn(pack: Pack) -> list[I32]:
    random = np.random.default_rng(0)
    return [random.permutation(pack.config.intermediate).astype(np.int32) for _ in pack.layers]


def renumbered(pack: Pack, orders: Sequence[I32]) -> Pack:
    directory = pack.path / "new"
    directory.mkdir()
    write_renumbered(pack, orders, directory)
    return Pack.open(directory)


@pytest.mark.parametrize(("name", "dtype"), [("llama", "f32"), ("opt", "f32"), ("opt", "q8"), ("opt", "q4")])
def test_a_renumbered_pack_equals_the_original(tiny_model: Tiny, tmp_path: Path, name: str, dtype: str) -> None:
    """OPT has biases, no gate, and records in every format."""
    old = packed(tiny_model, tmp_path, name, dtype)
    orders = drawn(old)
    new = renumbered(old, orders)
    new.verify()
    for layer, order in enumerate(orders):
        words = [part.name for part in old.layers[layer][1].run("neuron").parts]
        for word in words:
            before, after = (part(pack.layers[layer][1], "neuron", word) for pack in (old, new))
            assert (after[: len(order)] == before[order]).all()
            assert (after[len(order) :] == before[len(order) :]).all()
    expected, found = forward(old, TOKENS), forward(new, TOKENS)
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()
    assert new.tokenizer_info == old.tokenizer_info


def test_only_feed_forward_blocks_are_written_again(tiny_model: Tiny, tmp_path: Path) -> None:
    old = packed(tiny_model, tmp_path)
    new = renumbered(old, drawn(old))
    own = [path for path in new.path.glob("*.safetensors") if not path.is_symlink()]
    assert sorted(path.stem for path in own) == sorted({blocks[1].id for blocks in new.layers})
    assert sum(path.stat().st_size for path in own) <= renumber.ffn_bytes(old)


def test_a_file_system_without_links_gets_copies(
    tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    old = packed(tiny_model, tmp_path)
    new = renumbered(old, drawn(old))
    new.verify()
    assert not any(path.is_symlink() for path in new.path.iterdir())


def test_what_is_no_permutation_is_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    old = packed(tiny_model, tmp_path)
    with pytest.raises(ModelError, match="not a permutation"):
        renumbered(old, [*drawn(old)[1:], np.zeros(old.config.intermediate, np.int32)])


def test_tiles_are_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    """Neurons of a tile share scales, so they cannot be moved alone."""
    old = packed(tiny_model, tmp_path, "llama", "q8")
    with pytest.raises(ModelError, match="does not store its neurons as records"):
        renumbered(old, drawn(old))


def test_a_damaged_block_is_not_copied(tiny_model: Tiny, tmp_path: Path) -> None:
    old = packed(tiny_model, tmp_path)
    block = old.layers[1][1]
    with block.path.open("r+b") as file:
        file.seek(block.offset("neuron") + 5)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(WeightsError, match="is damaged"):
        renumbered(old, drawn(old))


def test_a_disk_without_room_is_refused(tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = packed(tiny_model, tmp_path)
    monkeypatch.setattr(renumber, "SPARE", 1 << 60)
    with pytest.raises(WeightsError, match=r"disk full: renumbered neurons take \d+ MiB"):
        renumbered(old, drawn(old))
    assert not list((old.path / "new").iterdir())

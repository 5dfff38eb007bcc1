"""Shard images: complete or invisible, checked, resumed, shared between splits and between equal layers."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.cluster_helpers import MadeUpModel
from tests.support.cluster.shards import check, fill, plan_of
from tpi.errors import WeightsError
from tpi.net.fields import IN_FLIGHT_BYTES
from tpi.net.transfers import UnitData
from worker.node_plan import node_blocks
from worker.shards import partial_image
from worker.shards.cache import ShardCache, _stamp
from worker.shards.fetch import Transfer
from worker.shards.image import image_name, image_pieces, image_token
from worker.shards.partial_image import PartialImage


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ShardCache]:
    opened = ShardCache(tmp_path / "shards")
    yield opened
    opened.close()


def test_the_second_start_needs_nothing(tmp_path: Path) -> None:
    model = MadeUpModel()
    assign = plan_of(model)
    for expected in (True, False, False):
        opened = ShardCache(tmp_path)
        held, sent = fill(opened, model, assign)
        opened.close()
        check(model, assign, held)
        assert bool(sent) == expected


@pytest.mark.parametrize("cut", [0, 1, 3, 5, 8])
def test_another_split_needs_only_what_is_new(cache: ShardCache, cut: int) -> None:
    model = MadeUpModel()
    fill(cache, model, plan_of(model, cut=4))
    assign = plan_of(model, cut=cut)
    held, sent = fill(cache, model, assign)
    check(model, assign, held)
    query, kv, neuron = model.layouts
    new = max(0, cut - 4)
    halves = max(0, -(-cut // 2) - 2)
    assert sent == model.layers * (new * query.unit_bytes + halves * kv.unit_bytes + 2 * new * neuron.unit_bytes)
    _, back = fill(cache, model, plan_of(model, cut=4))
    assert back == 0


def test_equal_layers_are_stored_and_sent_once(cache: ShardCache) -> None:
    model, single = MadeUpModel(layers=5, same=True), MadeUpModel(layers=1)
    held, sent = fill(cache, model, plan_of(model))
    assert len(held) == 2
    assert sent == fill(ShardCache(cache.root.parent / "other"), single, plan_of(single))[1]
    assert len(list(cache.root.glob("*/*.shard"))) == 2


def test_bit_flip_in_a_shard_on_disk(tmp_path: Path) -> None:
    model = MadeUpModel()
    assign = plan_of(model)
    opened = ShardCache(tmp_path)
    held, _ = fill(opened, model, assign)
    extent = held[1].extent
    with extent.path.open("r+b") as file:
        file.seek(extent.offset + 5)
        byte = file.read(1)[0]
        file.seek(extent.offset + 5)
        file.write(bytes([byte ^ 1]))
    held, sent = fill(opened, model, assign)
    opened.close()
    assert sent == model.layouts[2].unit_bytes
    check(model, assign, held)


def test_a_flipped_bit_in_the_vectors_is_found(cache: ShardCache) -> None:
    model = MadeUpModel()
    assign = plan_of(model)
    held, _ = fill(cache, model, assign)
    data = bytearray(held[0].extent.path.read_bytes())
    data[image_pieces(node_blocks(assign)[0])[0].offset] ^= 4
    held[0].extent.path.write_bytes(data)
    held, sent = fill(cache, model, assign)
    assert sent == len(model.units[model.ids[0], "vectors"][0])
    check(model, assign, held)


def test_vectors_changed_after_their_check_are_mended(cache: ShardCache) -> None:
    model = MadeUpModel()
    assign = plan_of(model)
    (damaged, *_), _ = fill(cache, model, assign)
    plan, path = node_blocks(assign)[0], damaged.extent.path
    data = bytearray(path.read_bytes())
    data[image_pieces(plan)[0].offset] ^= 4
    path.write_bytes(data)
    stamp = _stamp(path, image_token(plan))
    assert stamp
    cache._checked[path.relative_to(cache.root).as_posix()] = stamp
    with pytest.raises(WeightsError, match=rf"{path} is damaged: its vectors .* restart TPI to fetch it again"):
        cache.open([plan])
    held, sent = fill(cache, model, assign)
    assert sent == len(model.units[model.ids[0], "vectors"][0])
    check(model, assign, held)


def test_an_interrupted_transfer_goes_on_where_it_was(tmp_path: Path) -> None:
    model = MadeUpModel(width=64, units=256)  # 8 MiB of neurons
    assign = plan_of(model, cut=128)
    opened = ShardCache(tmp_path)
    first = next(block for block in opened.open(node_blocks(assign)).values() if isinstance(block, PartialImage))
    needs = list(first.needs())
    for need in needs[:3]:
        first.accept(UnitData(need.block, need.run, need.first, need.last, model.read(need)))
    left = first.missing_bytes
    opened.close()  # as after a kill: the partial image was never closed

    opened = ShardCache(tmp_path)
    again = opened.open(node_blocks(assign))[first.block.id]
    assert isinstance(again, PartialImage)
    assert again.missing_bytes == left
    held, _ = fill(opened, model, assign)
    opened.close()
    check(model, assign, held)


def test_no_more_than_four_mebibytes_are_under_way(cache: ShardCache) -> None:
    model = MadeUpModel(width=64, units=256)
    partials = [
        block for block in cache.open(node_blocks(plan_of(model, cut=128))).values() if isinstance(block, PartialImage)
    ]
    transfer = Transfer(partials, lambda partial: None)
    asked = list(transfer.next())
    assert 0 < sum(len(model.read(need)) for need in asked) <= IN_FLIGHT_BYTES
    assert len(asked) > 1
    transfer.restart()
    assert list(transfer.next()) == asked


def test_bit_flip_in_a_shard_on_the_wire(cache: ShardCache) -> None:
    model = MadeUpModel()
    partials = [block for block in cache.open(node_blocks(plan_of(model))).values() if isinstance(block, PartialImage)]
    done: list[PartialImage] = []
    transfer = Transfer(partials, done.append)
    need, *others = list(transfer.next())
    data = bytearray(model.read(need))
    data[0] ^= 1
    transfer.accept(UnitData(need.block, need.run, need.first, need.last, memoryview(data)))
    for other in others:
        transfer.accept(UnitData(other.block, other.run, other.first, other.last, model.read(other)))
    asked = []
    while batch := list(transfer.next()):
        asked += batch
        for other in batch:
            transfer.accept(UnitData(other.block, other.run, other.first, other.last, model.read(other)))
    assert [again for again in asked if (again.block, again.run, again.last) == (need.block, need.run, need.first + 1)]
    assert sorted(map(id, done)) == sorted(map(id, partials))
    assert transfer.complete

    model = MadeUpModel(seed=1)
    partials = [block for block in cache.open(node_blocks(plan_of(model))).values() if isinstance(block, PartialImage)]
    transfer = Transfer(partials, done.append)
    with pytest.raises(WeightsError, match="arrived damaged 3 times"):
        _answer_with_zeros(transfer, model)


def _answer_with_zeros(transfer: Transfer, model: MadeUpModel) -> None:
    while True:
        for need in transfer.next():
            junk = memoryview(bytes(len(model.read(need))))
            transfer.accept(UnitData(need.block, need.run, need.first, need.last, junk))


def test_disk_full(cache: ShardCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightsError, match=r"disk full: .*--cache"):
        cache.open(node_blocks(plan_of(MadeUpModel())))
    assert not list(tmp_path.rglob("*.part"))
    assert not list(tmp_path.rglob("*.shard"))


def test_a_disk_that_fills_up_while_writing_leaves_nothing(
    cache: ShardCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = MadeUpModel(layers=1)
    assign = plan_of(model)
    partial = next(iter(cache.open(node_blocks(assign)).values()))
    assert isinstance(partial, PartialImage)
    need = next(partial.needs())

    def full(descriptor: int, data: memoryview, offset: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(partial_image, "_write_all", full)
    with pytest.raises(WeightsError, match="disk full"):
        partial.accept(UnitData(need.block, need.run, need.first, need.last, model.read(need)))
    assert not partial.path.exists()


def test_too_little_room_is_said_before_anything_is_made(
    cache: ShardCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = os.statvfs(tmp_path)
    small = os.statvfs_result((*found[:4], 1, *found[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    with pytest.raises(WeightsError, match="disk full"):
        cache.open(node_blocks(plan_of(MadeUpModel())))
    assert not list(tmp_path.rglob("*.part"))


def test_two_processes_can_share_a_cache(cache: ShardCache) -> None:
    model = MadeUpModel()
    assign = plan_of(model)
    other = ShardCache(cache.root)
    mine, theirs = (each.open(node_blocks(assign)) for each in (cache, other))
    assert not {block.path for block in mine.values() if isinstance(block, PartialImage)} & {
        block.path for block in theirs.values() if isinstance(block, PartialImage)
    }
    for each in (cache, other):
        held, _ = fill(each, model, assign)
        check(model, assign, held)
    _, sent = fill(other, model, plan_of(model, cut=2))
    assert sent == 0
    assert all(block.extent.path.exists() for block in held)
    other.close()


def test_what_is_no_image_is_ignored(cache: ShardCache) -> None:
    model = MadeUpModel()
    assign = plan_of(model)
    for plan in node_blocks(assign):
        folder = cache.root / plan.id.hex()
        folder.mkdir()
        for number, junk in enumerate([b"", b"TPIshard", b"TPIshard" + bytes(8), os.urandom(5000)]):
            (folder / f"junk{number}.shard").write_bytes(junk)
        (folder / image_name(plan)).write_bytes(b"short")
    held, sent = fill(cache, model, assign)
    assert sent
    check(model, assign, held)

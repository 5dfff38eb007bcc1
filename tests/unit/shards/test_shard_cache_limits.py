"""A shard cache removes partial images that were left behind, and images over the limit, but none that is in use."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from tests.support.cluster.cluster_helpers import MadeUpModel
from tests.support.cluster.shards import check, fill, plan_of
from tests.support.paths import ROOT
from tpi.cachelimit import CacheLimit
from tpi.errors import WeightsError
from worker.node_plan import node_blocks
from worker.shards.cache import ShardCache
from worker.shards.image import HeldBlock, image_bytes
from worker.shards.partial_image import PartialImage
from worker.shards.stored import key_of, stored_images

# Uses the images of a model with argv[2] units below the cut in the cache argv[1] until its stdin closes.
USER = """
import sys
from pathlib import Path
from tests.support.cluster.cluster_helpers import MadeUpModel
from tests.support.cluster.shards import plan_of
from worker.shards.cache import ShardCache
from worker.node_plan import node_blocks

cache = ShardCache(Path(sys.argv[1]))
cache.open(node_blocks(plan_of(MadeUpModel(), cut=int(sys.argv[2]))))
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ShardCache]:
    opened = ShardCache(tmp_path)
    yield opened
    opened.close()


@contextmanager
def user(root: Path, cut: int) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", USER, str(root), str(cut)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "open\n"
        yield process


def partials(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*.part")}


def images(root: Path, model: MadeUpModel) -> int:
    return sum(len(list((root / block.hex()).glob("*.shard"))) for block in model.ids)


def held_bytes(root: Path) -> int:
    return sum(image.nbytes for image in stored_images(root))


def test_partial_images_of_other_plans_go_with_a_complete_plan(cache: ShardCache) -> None:
    model = MadeUpModel()
    cache.open(node_blocks(plan_of(model, cut=2)))
    cache.open(node_blocks(plan_of(MadeUpModel(seed=1))))
    assert len(partials(cache.root)) > 4
    assign = plan_of(model)
    check(model, assign, fill(cache, model, assign)[0])
    assert partials(cache.root) == set()
    assert sorted(path.name for path in cache.root.iterdir() if path.is_dir() and path.name != "uses") == sorted(
        block.hex() for block in model.ids
    )


def test_only_partial_images_of_dead_processes_are_removed(cache: ShardCache) -> None:
    model = MadeUpModel()
    with user(cache.root, cut=2) as process:
        begun = partials(cache.root)
        fill(cache, model, plan_of(model))
        assert partials(cache.root) == begun != set()
        process.kill()
    fill(cache, model, plan_of(model))
    assert partials(cache.root) == set()


def test_pruning_takes_nothing_that_is_opened_meanwhile(cache: ShardCache, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MadeUpModel()
    for cut in (1, 2):
        fill(cache, model, plan_of(model, cut=cut))
    other = ShardCache(cache.root)
    got: list[HeldBlock | PartialImage] = []
    unlink = Path.unlink

    def opened() -> None:
        got.extend(other.open(node_blocks(plan_of(model, cut=1))).values())

    late = Thread(target=opened)

    def slow(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".shard" and not late.ident:
            late.start()
            late.join(0.5)  # it can end only where nothing keeps it from opening what is about to go
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", slow)
    fill(cache, model, plan_of(model, cut=3))
    late.join()
    assert got
    assert all(block.extent.path.exists() for block in got if isinstance(block, HeldBlock))
    other.close()


def test_a_limit_lets_the_least_recently_used_go_first(tmp_path: Path) -> None:
    models = [MadeUpModel(width=64, seed=seed) for seed in range(4)]
    with_all = ShardCache(tmp_path / "measure")
    fill(with_all, models[0], plan_of(models[0]))
    each = held_bytes(with_all.root)
    with_all.close()
    opened = ShardCache(tmp_path / "a", CacheLimit(3 * each))
    for number in (0, 1, 2):
        fill(opened, models[number], plan_of(models[number]))
    for path in (tmp_path / "a").rglob("*.used"):
        os.utime(path, (10**9, 10**9))
    fill(opened, models[0], plan_of(models[0]))  # the first is now the latest
    fill(opened, models[3], plan_of(models[3]))
    assert held_bytes(opened.root) <= 3 * each
    assert images(opened.root, models[0]) == images(opened.root, models[3]) == 4
    assert images(opened.root, models[1]) + images(opened.root, models[2]) == 4
    opened.close()


def test_a_plan_over_the_limit_is_refused_before_any_work(tmp_path: Path) -> None:
    opened = ShardCache(tmp_path, CacheLimit(4096))
    with pytest.raises(
        WeightsError, match=r"the shards of this plan need \d+ MiB, but .*; raise --cache-limit on this node"
    ):
        opened.open(node_blocks(plan_of(MadeUpModel())))
    assert partials(tmp_path) == set()
    opened.close()


def test_what_a_living_process_uses_stays_whatever_the_limit(tmp_path: Path) -> None:
    model, other = MadeUpModel(), MadeUpModel(seed=1)
    first = ShardCache(tmp_path)
    held, _ = fill(first, model, plan_of(model, cut=2))
    first.close()
    needed = sum(image_bytes(plan) for plan in node_blocks(plan_of(other)))
    with user(tmp_path, cut=2) as process:
        second = ShardCache(tmp_path, CacheLimit(needed))
        fill(second, other, plan_of(other))
        assert all(block.extent.path.exists() for block in held)
        process.kill()
        process.wait()
        fill(second, MadeUpModel(seed=2), plan_of(MadeUpModel(seed=2)))
        assert not any(block.extent.path.exists() for block in held)
        second.close()


def test_a_full_disk_lets_others_go_before_it_is_an_error(cache: ShardCache, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = MadeUpModel(), MadeUpModel(seed=1)
    fill(cache, old, plan_of(old))
    found = os.statvfs(cache.root)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((1, 1, *found[2:4], 2 * 4096, *found[5:])))
    with pytest.raises(WeightsError, match="disk full"):
        cache.open(node_blocks(plan_of(new)))
    assert images(cache.root, old) == 0


def test_keys_of_images_and_of_their_partial_images_are_the_same() -> None:
    for name in ("query.0-4_kv.0-2", "neuron.3-7"):
        keys = {key_of(Path("root/ab") / f"{name}{end}") for end in (".shard", ".part", ".123.part")}
        assert keys == {f"ab/{name}"}


def test_a_cache_that_went_away_is_a_sentence(tmp_path: Path) -> None:
    opened = ShardCache(tmp_path / "shards")
    for path in sorted((tmp_path / "shards").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "shards").rmdir()
    with pytest.raises(WeightsError, match=r"cannot use .*shards as a cache.*--cache"):
        opened.open(node_blocks(plan_of(MadeUpModel())))
    opened.close()


def test_a_plan_that_is_over_uses_nothing(tmp_path: Path) -> None:
    model = MadeUpModel()
    needed = sum(image_bytes(plan) for plan in node_blocks(plan_of(model)))
    opened, other = ShardCache(tmp_path), ShardCache(tmp_path, CacheLimit(needed))
    held, _ = fill(opened, model, plan_of(model))
    assert isinstance(next(iter(other.open(node_blocks(plan_of(model))).values())), HeldBlock | PartialImage)
    other.release()
    opened.release()
    fill(other, MadeUpModel(seed=1), plan_of(MadeUpModel(seed=1)))
    assert not any(block.extent.path.exists() for block in held)
    opened.close()
    other.close()


def test_what_was_checked_is_forgotten_with_its_file(tmp_path: Path) -> None:
    models = [MadeUpModel(seed=seed) for seed in range(2)]
    opened = ShardCache(tmp_path)
    fill(opened, models[0], plan_of(models[0]))
    shutil.rmtree(tmp_path / models[0].ids[0].hex())
    fill(opened, models[1], plan_of(models[1]))
    opened.close()
    known = json.loads((tmp_path / "checked.json").read_text())
    assert {key.partition("/")[0] for key in known} == {block.hex() for block in models[0].ids[1:] + models[1].ids}

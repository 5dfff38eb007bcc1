"""Weights that changed on the disk after they were checked are noticed when they are loaded (`--verify-weights`)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from master.deployment.assignments import assignments
from master.deployment.stages import one_stage
from master.generation.engine import Engine
from master.vocabulary.sampler import Sampler, Sampling
from master.vocabulary.vocabulary import Vocabulary
from scheduler.storage.disk import DirectDisk
from scheduler.window.window import MemoryWindow
from tests.support.cluster.single import Setting, single_node
from tests.support.generating import generate
from tpi.devices.pages import PAGE, Bytes, round_up
from tpi.errors import WeightsError
from tpi.net.messages import NodeOptions, PeerAddress
from tpi.pack.reader import Pack
from worker.node_plan import node_plan
from worker.plan import segments
from worker.plan.fit import need

PROMPT = [5, 6, 7, 8]
ALWAYS = 1 << 30
KEPT = Setting(verify=True)
STREAMED = Setting(window=1, verify=True)


class FlippingDisk(DirectDisk):
    """A disk that flips a bit in the middle of a read of one file, a given number of times."""

    def __init__(self, path: Path, times: int) -> None:
        super().__init__(chunk=64 * PAGE, threads=1)
        self.path = path
        self.times = times

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        got = super().read(path, offset, into)
        if path == self.path and self.times:
            self.times -= 1
            into[got // 2] ^= 4
        return got


@pytest.fixture
def copy(tiny_pack: Callable[..., Pack], tmp_path: Path) -> Pack:
    """Return a copy of a pack, which a test may damage."""
    target = tmp_path / "pack"
    target.mkdir()
    for file in tiny_pack("llama").path.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return Pack.open(target)


def tokens(engine: Engine) -> list[int]:
    sequence = engine.admit(PROMPT)
    made = [one.token for one in generate(engine, sequence, Sampler(Sampling(temperature=0)), 6)]
    engine.release(sequence)
    return made


def expected(pack: Pack, cache: Path) -> list[int]:
    with single_node(pack, Setting(), cache=cache) as (engine, _):
        return tokens(engine)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def test_a_block_that_stays_fails_the_load(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    pack = tiny_pack("llama")
    block = pack.layers[1][0]
    wrong = rf"{block.path} is damaged: unit \d of (query|kv) does not match its hash; start again"
    with pytest.raises(WeightsError, match=wrong), single_node(pack, KEPT, FlippingDisk(block.path, ALWAYS), tmp_path):
        pass


def test_a_damaged_streamed_block_fails_one_step(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    pack = tiny_pack("llama")
    block = pack.layers[1][1]
    disk = FlippingDisk(block.path, ALWAYS)
    with single_node(pack, STREAMED, disk, tmp_path) as (engine, node):
        assert isinstance(node.window, MemoryWindow)
        with pytest.raises(WeightsError, match=rf"{block.path} is damaged: unit \d of neuron"):
            tokens(engine)
        disk.times = 0
        assert tokens(engine) == expected(pack, tmp_path)


@pytest.mark.parametrize("setting", [KEPT, STREAMED])
def test_what_is_right_when_read_again_goes_on(
    setting: Setting, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    pack = tiny_pack("llama")
    for block in pack.layers[0]:
        disk = FlippingDisk(block.path, 1)
        with single_node(pack, setting, disk, tmp_path) as (engine, _):
            assert tokens(engine) == expected(pack, tmp_path)
        assert not disk.times


@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_every_tile_is_compared_with_its_own_units(
    dtype: str, tiny_pack: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "tile_size", lambda smallest: 1)
    pack = tiny_pack("llama", dtype)
    with single_node(pack, Setting(), cache=tmp_path) as (_, node):
        placement, everything = node.budget.placement, node.budget.used
    setting = Setting(memory=everything - sum(placement.sizes) // pack.config.layers, verify=True)
    path = pack.layers[1][1].path
    with single_node(pack, setting, FlippingDisk(path, 0), tmp_path) as (engine, node):
        assert max(node.segments) > 1
        assert tokens(engine) == expected(pack, tmp_path)
    with (
        pytest.raises(WeightsError, match=rf"{path} is damaged: unit \d of neuron"),
        single_node(pack, setting, FlippingDisk(path, ALWAYS), tmp_path) as (engine, _),
    ):
        tokens(engine)


def test_a_table_in_memory_is_compared(copy: Pack, tmp_path: Path) -> None:
    for block in (copy.head, copy.embedding):
        at = block.offset("row") + 7
        flip(block.path, at)
        wrong = rf"{block.path} is damaged: unit 0 of row does not match its hash"
        with pytest.raises(WeightsError, match=wrong), single_node(copy, KEPT, cache=tmp_path):
            pass
        flip(block.path, at)
    with single_node(copy, KEPT, cache=tmp_path) as (engine, _):
        assert tokens(engine) == expected(copy, tmp_path)


def test_a_table_on_the_disk_is_compared_when_it_is_read(copy: Pack, tmp_path: Path) -> None:
    with single_node(copy, KEPT, cache=tmp_path) as (_, node):
        unit = copy.head.run("row").unit_bytes
        budget = replace(node.budget, head_bytes=2 * (round_up(unit) + PAGE), embedding_bytes=0)
    row = copy.config.vocab - 1
    with Vocabulary(copy, budget, verify=True) as vocabulary:
        x = vocabulary.embedding([1, row], [0, 1])
        assert vocabulary.head(x).shape == (2, copy.config.vocab)
    for block in (copy.head, copy.embedding):
        last = block.run("row").units - 1
        flip(block.path, block.offset("row", last))
    with Vocabulary(copy, budget, verify=True) as vocabulary:
        vocabulary.embedding([1], [0])
        with pytest.raises(WeightsError, match=rf"{copy.embedding.path} is damaged: unit {last} of row"):
            vocabulary.embedding([row], [0])
        with pytest.raises(WeightsError, match=rf"{copy.head.path} is damaged: unit {last} of row"):
            vocabulary.head(x)


def test_vectors_are_always_compared_and_named_by_block(copy: Pack) -> None:
    for block in (copy.layers[0][0], copy.head, copy.final):
        flip(block.path, block.shape.nbytes - 1)
        with pytest.raises(WeightsError, match=rf"{block.path} is damaged: its content does not match its name"):
            block.vectors()
        with pytest.raises(WeightsError, match="does not match its name"):
            block.verify()


def test_hashes_count_in_the_budget(tiny_pack: Callable[..., Pack]) -> None:
    pack = tiny_pack("llama")
    stages, options = one_stage(pack, [1.0]), NodeOptions(64, 4, "f32", 16)
    (one,) = assignments(pack, stages, [PeerAddress(0, "node", "")], options, 1, 1)
    compared = replace(one, options=replace(options, verify_weights=True))
    units = sum(run.units for block in pack.walk() for run in block.shape.runs)
    assert need(node_plan(compared)).fixed == need(node_plan(one)).fixed + 32 * units

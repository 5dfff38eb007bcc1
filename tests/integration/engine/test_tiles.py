"""Feed-forward blocks in tiles: the tokens of whole blocks, and the steady-state analysis per block."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from master.generation.engine import Engine
from master.vocabulary.sampler import Sampler, Sampling
from scheduler import budget
from scheduler.model.placement import Placement, place_window
from scheduler.model.ring import smallest
from scheduler.model.steady import Times, judge_streaming, whole
from scheduler.model.timeline import Costs
from scheduler.window.window import MemoryWindow, Resident
from tests.support.cluster.single import Setting, single_node
from tests.support.generating import generate
from tpi.pack.layout import Part, RunLayout
from tpi.pack.reader import Pack
from tpi.partition import Range
from worker.node_plan import NodeBlock, RunUnits
from worker.plan import segments

PROMPT = [5, 6, 7, 8]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tiles small enough to divide tiny models, too."""
    monkeypatch.setattr(segments, "tile_size", lambda smallest: 1)


def tokens(engine: Engine) -> list[int]:
    sequence = engine.admit(PROMPT)
    made = [one.token for one in generate(engine, sequence, Sampler(Sampling(temperature=0)), 8)]
    engine.release(sequence)
    return made


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", ["f32", "q4"])
@pytest.mark.parametrize("family", ["llama", "opt", "gemma2"])
def test_tiles_give_the_same_tokens(family: str, dtype: str, tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    pack = tiny_pack(family, dtype)
    with single_node(pack, Setting(), cache=tmp_path) as (engine, node):
        expected, everything = tokens(engine), node.budget.used
        assert isinstance(node.window, Resident)
        assert node.segments == [1, 1] * pack.config.layers
    layer = sum(node.budget.placement.sizes) // pack.config.layers
    with single_node(pack, Setting(memory=everything - layer), cache=tmp_path) as (engine, node):
        assert isinstance(node.window, MemoryWindow)
        planned, joined = node.budget.placement, node.window.placement
        assert max(node.segments) > 1
        assert sum(node.segments) == len(joined.sizes) <= len(planned.sizes)
        assert joined.streamed_bytes == planned.streamed_bytes
        assert joined.memory_bytes <= planned.memory_bytes
        assert tokens(engine) == expected
        assert node.steady() is not None
        assert node.streamed.read_bytes > 0


@pytest.mark.usefixtures("small_tiles")
def test_a_tile_that_streams_parts_its_neighbours(
    monkeypatch: pytest.MonkeyPatch, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    def all_but_one(sizes: Sequence[int], *_: object) -> Placement:
        return Placement(tuple(sizes), frozenset(range(len(sizes))) - {3}, smallest([3], sizes, 1))

    pack = tiny_pack("llama")
    with single_node(pack, Setting(), cache=tmp_path) as (engine, node):
        expected, everything = tokens(engine), node.budget.used
    monkeypatch.setattr(budget, "_placed", all_but_one)
    with single_node(pack, Setting(memory=everything), cache=tmp_path) as (engine, node):
        assert node.segments == [1, 3, 1, 1]
        assert tokens(engine) == expected


@pytest.mark.usefixtures("small_tiles")
def test_the_papers_window_counts_whole_blocks(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    pack = tiny_pack("llama")
    with single_node(pack, Setting(window=2), cache=tmp_path) as (_, node):
        assert node.segments == [1, 1] * pack.config.layers


def test_small_blocks_stay_whole(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    pack = tiny_pack("llama")
    with single_node(pack, Setting(), cache=tmp_path) as (_, node):
        everything = node.budget.used
    with single_node(pack, Setting(memory=everything - 4096), cache=tmp_path) as (_, node):
        assert node.segments == [1, 1] * pack.config.layers


NEURON = RunLayout("neuron", "tiled", (Part("up", "q4", "row"), Part("down", "q4", "column")), 32, 32, 100)


def some_units(first: int, last: int) -> RunUnits:
    return RunUnits(NEURON, Range(first, last), b"".join(bytes([unit]) * 32 for unit in range(first, last)))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_only_neighbours_that_stay_are_joined(counts: list[int], data: st.DataObject) -> None:
    blocks = [
        NodeBlock(number, number, "ffn", number, (some_units(0, 3 * count),)) for number, count in enumerate(counts)
    ]
    before = [
        segments.NodeSegment(block, (block.runs[0].cut(Range(3 * at, 3 * at + 3)),))
        for block, count in zip(blocks, counts, strict=True)
        for at in range(count)
    ]
    resident = data.draw(st.sets(st.integers(0, len(before) - 1)))
    after, numbers = segments.join(before, resident)
    assert len(numbers) == len(before)
    assert sorted(set(numbers)) == list(range(len(after)))
    for number, new in enumerate(after):
        parts = [old for old, now in enumerate(numbers) if now == number]
        assert {before[old].block.number for old in parts} == {new.block.number}
        assert b"".join(before[old].runs[0].hashes for old in parts) == new.runs[0].hashes
        assert new.runs == (some_units(before[parts[0]].runs[0].units.first, before[parts[-1]].runs[0].units.last),)
        assert len(parts) == 1 or resident >= set(parts)
    for old, (now, then) in enumerate(pairwise(numbers)):
        if now != then and before[old].block is before[old + 1].block:
            assert not resident >= {old, old + 1}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_costs_of_tiles_add_up(counts: list[int], data: st.DataObject) -> None:
    seconds = st.lists(st.floats(0.001, 10), min_size=sum(counts), max_size=sum(counts))
    costs = Costs(data.draw(seconds), data.draw(seconds), data.draw(seconds))
    everything = set(range(sum(counts)))
    merged, streamed = whole(costs, everything, counts, [4096] * sum(counts))
    assert merged.busy == pytest.approx(costs.busy)
    assert sum(merged.load) == pytest.approx(sum(costs.load))
    assert streamed == set(range(len(counts)))
    assert whole(costs, set(), counts, [4096] * sum(counts))[1] == set()


def test_a_partly_resident_half_loads_as_fast_as_its_other_tiles() -> None:
    """Two layers have attention and two FFN tiles.

    The first tile stays resident, so its one load is not representative.
    """
    placement = place_window([4096] * 6, 1)
    costs = Costs([1.0] * 6, [0.0, 0.0, 2.0] * 2, [3.0, 50.0, 3.0] * 2)
    merged, streamed = whole(costs, {0, 2, 3, 5}, [1, 2, 1, 2], [4096] * 6)
    assert list(merged.load) == [3.0, 6.0, 3.0, 6.0]
    assert streamed == {0, 1, 2, 3}
    larger, _ = whole(costs, {0, 2, 3, 5}, [1, 2, 1, 2], [4096, 3 * 4096, 4096] * 2)
    assert list(larger.load) == [3.0, 12.0, 3.0, 12.0]
    report = judge_streaming(placement, costs, tiles=[1, 2, 1, 2])
    assert report.times == Times(1.0, 2.0, 1.0, 3.0, 53.0)

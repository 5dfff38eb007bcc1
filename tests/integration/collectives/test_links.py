"""Links: predictions against the design's formulas, measuring, caching, and the choice that all nodes share."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import combinations
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allreduce import cache, choose
from allreduce.auto import Auto
from allreduce.base import Group
from allreduce.choose import Choice, candidates
from allreduce.measure import measure_links, rounds
from allreduce.predict import predict
from tests.support.cluster.collective_helpers import House, run_group
from tests.support.devices.virtual_time import VirtualTime
from tpi.topology.links import Link, LinkTable

MS, MBIT = 1e-3, 1e6 / 8
PAPER = LinkTable.uniform(8, Link(4 * MS, 300 * MBIT))


def test_tables_survive_a_message() -> None:
    assert LinkTable.from_dict(PAPER.to_dict()) == PAPER


def test_closed_forms_on_equal_links() -> None:
    count, latency, rate = 576, 4 * MS, 300 * MBIT
    payload, n = 4 * count, 8
    assert predict("star", PAPER, count, "f32") == pytest.approx(2 * (latency + (n - 1) * payload / rate))
    assert predict("mesh", PAPER, count, "f32") == pytest.approx(latency + (n - 1) * payload / rate)
    chunk = 4 * 96  # 576 values in chunks of whole groups of 32: 6 of 96, 2 empty
    assert predict("two-shot", PAPER, count, "f32") == pytest.approx(2 * (latency + (n - 1) * chunk / rate))
    assert predict("ring", PAPER, count, "f32") == pytest.approx(2 * (n - 1) * (latency + chunk / rate))


def test_the_paper_and_the_design_agree_with_the_predictions() -> None:
    small = {name: predict(name, PAPER, 576, "f32") for name in candidates()}
    assert small["mesh"] < 0.65 * small["star"]
    assert small["star"] < min(small["tree"], small["ring"])
    large = {name: predict(name, PAPER, 128 * 576, "f32") for name in candidates()}
    assert min(large, key=lambda name: large[name]) == "two-shot"


def test_a_slow_node_slows_the_sums_that_wait_for_it() -> None:
    links = {pair: Link(MS, 1000 * MBIT) for pair in combinations(range(4), 2)}
    links |= {pair: Link(50 * MS, 1 * MBIT) for pair in links if 3 in pair}
    table = LinkTable(4, links)
    for name in candidates():
        assert predict(name, table, 4096, "f32") > 0.1


@given(st.integers(2, 12))
def test_every_pair_meets_once_and_no_node_twice_a_round(size: int) -> None:
    turns = rounds(size)
    assert sorted(pair for pairs in turns for pair in pairs) == list(combinations(range(size), 2))
    for pairs in turns:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))


def test_measured_links_are_plausible_and_shared() -> None:
    def node(group: Group) -> LinkTable:
        assert isinstance(group, Auto)
        return measure_links(group.transport, {})

    tables = run_group("auto", 3, node)
    assert tables[0] == tables[1] == tables[2]
    for link in tables[0].links.values():
        assert 0 < link.latency_s < 0.5
        assert link.bytes_per_s > 1e5


def test_known_links_are_not_measured() -> None:
    known = {pair: Link(0.25, 2.0**20) for pair in combinations(range(3), 2)}

    def node(group: Group) -> LinkTable:
        assert isinstance(group, Auto)
        return measure_links(group.transport, known if group.rank == 0 else {})

    assert all(table.links == known for table in run_group("auto", 3, node))


def test_links_are_cached_by_peer(tmp_path: Path) -> None:
    path = tmp_path / "made" / "links.json"
    with House(3) as house:
        ends = cache.ends(house.spec(0))
        assert cache.load(path, ends) == {}
        cache.save(path, ends, LinkTable.uniform(3, Link(0.5, 2.0)).links, {})
        known = cache.load(path, ends)
        assert {pair: one.link for pair, one in known.items()} == LinkTable.uniform(3, Link(0.5, 2.0)).links
        assert all(0 <= one.age_s < 60 and not one.confirmed for one in known.values())
    with House(3) as other:
        assert (0, 1) not in cache.load(path, cache.ends(other.spec(0)))
    assert cache.load(path, ends[::-1]).keys() == known.keys()  # in whatever order the nodes are
    path.write_text('{"x": [1, "no"]')
    assert cache.load(path, ends) == {}


def tuned(known: Link, path: Path) -> tuple[Choice, float, LinkTable]:
    """Return the master's choice, and the age and table of its links, if all links were remembered as `known`."""

    def node(rank: int) -> Auto:
        with closing(Auto(house.spec(rank), house.endpoints(rank, links_cache=path))) as group:
            group.begin(1)
            group.tune(measure_local=True)
            barrier.wait(30)
            return group

    barrier = Barrier(3)
    with House(3, payload_values=(64, 2048)) as house, ThreadPoolExecutor(3) as pool:
        cache.save(path, cache.ends(house.spec(0)), LinkTable.uniform(3, known).links, {})
        master, *others = pool.map(node, range(3))
        remembered = cache.load(path, cache.ends(house.spec(0)))
    assert master.choice is not None
    assert master.links is not None
    assert all(other.links == master.links and other.choice == master.choice for other in others)
    for pair, link in master.links.links.items():
        assert remembered[pair].link.latency_s == pytest.approx(link.latency_s)
    return master.choice, master.choice.links_age_s, master.links


def test_links_that_the_sums_contradict_are_measured_again(tmp_path: Path) -> None:
    _, age, links = tuned(Link(1.0, 1e9), tmp_path / "links.json")
    assert age == 0
    assert all(link.latency_s < 0.5 for link in links.links.values())


def test_links_that_the_sums_confirm_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allreduce.auto.contradicts", lambda predicted, measured: False)
    choice, age, links = tuned(Link(1e-3, 1e9), tmp_path / "links.json")
    assert 0 < age < 60
    assert {link.latency_s for link in links.links.values()} == {np.float32(1e-3).item()}
    assert choice.predicted["mesh"][0] == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize(
    ("measured", "odd"),
    [
        ({"star": 0.09, "mesh": 0.05}, True),
        ({"star": 0.09, "mesh": 0.02}, False),  # one of them was delayed
        ({"star": 0.001, "mesh": 0.001}, True),
        ({"star": 0.0, "mesh": 0.05}, True),  # star was not timed
        ({"star": 0.0, "mesh": 0.0}, False),
    ],
)
def test_all_timed_sums_must_contradict(measured: dict[str, float], odd: bool) -> None:
    predicted = {"star": (0.02, 0.1, 0.1), "mesh": (0.01, 0.1, 0.1)}
    assert choose.contradicts(predicted, {name: (took, 0.1, 0.1) for name, took in measured.items()}) is odd


def test_a_doubted_link_is_confirmed_and_old_ones_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    with House(2) as house:
        ends = cache.ends(house.spec(0))
        known = {(0, 1): cache.CachedLink(Link(0.5, 2.0), 0.0)}
        cache.save(path, ends, LinkTable.uniform(2, Link(0.4, 3.0)).links, known, doubted=True)
        assert cache.load(path, ends)[0, 1].confirmed
        cache.save(path, ends, LinkTable.uniform(2, Link(0.1, 3.0)).links, known, doubted=True)
        assert not cache.load(path, ends)[0, 1].confirmed
        entries = {key: [*entry[:2], entry[2] - cache.FRESH_S] for key, entry in json.loads(path.read_text()).items()}
        path.write_text(json.dumps(entries))
        assert cache.load(path, ends) == {}


def test_links_that_a_run_contradicts_are_measured_once_more(tmp_path: Path) -> None:
    path, ends = tmp_path / "links.json", ["master", "a", "b"]
    cache.save(path, ends, LinkTable.uniform(3, Link(0.4, 3.0)).links, {})
    cache.save(path, ["a", "c"], {(0, 1): Link(0.4, 3.0)}, {})
    for group in (ends, ["a", "b", "c"]):
        cache.save_software(path, group, 1e-3)
    assert cache.doubt(path, ends) == {frozenset(pair) for pair in combinations(ends, 2)}
    assert cache.load(path, ends) == {}
    assert cache.software(path, ends) == {}
    assert cache.load(path, ["a", "c"])  # links and groups with other nodes stay
    assert cache.software(path, ["a", "b", "c"]) == {3: 1e-3}
    assert cache.doubt(path, ends) == set()
    again = {(0, 1): Link(0.3, 3.0), (0, 2): Link(0.1, 3.0), (1, 2): Link(0.4, 3.0)}
    cache.save(path, ends, again, {})
    assert {pair for pair, one in cache.load(path, ends).items() if one.confirmed} == {(0, 1), (1, 2)}
    assert cache.doubt(path, ends) == {frozenset(("master", "b"))}


def test_the_software_of_a_sum_is_learnt_from_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allreduce.auto.contradicts", lambda predicted, measured: False)
    path = tmp_path / "links.json"
    choice, _, _ = tuned(Link(1e-7, 1e12), path)
    ends = [*{name for key in json.loads(path.read_text()) for name in key.split(" ")} - {"software"}]
    assert len(ends) == 3
    known = cache.software(path, [*ends, "another"])
    assert known == {3: choice.software}
    assert choice.software == pytest.approx(choice.measured[choice.decode][0], rel=0.1)  # such links take no time
    assert cache.software(path, ends[1:]) == {}
    assert set(cache.load(path, ends)) == {(0, 1), (0, 2), (1, 2)}


def test_the_latest_group_of_as_many_nodes_tells_the_software(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now = tmp_path / "links.json", 1e9
    for ends, seconds in ((["master", "a"], 2e-3), (["b", "master"], 1e-3), (["master", "a", "b"], 0.0)):
        now += 60
        monkeypatch.setattr("allreduce.cache.time", lambda at=now: at)
        cache.save_software(path, ends, seconds)
    assert cache.software(path, ["master", "a", "b"]) == {2: 1e-3, 3: pytest.approx(0.0, abs=1e-5)}
    assert cache.software(path, ["master", "a"]) == {2: 2e-3}
    monkeypatch.setattr("allreduce.cache.time", lambda: now + cache.FRESH_S - 100)
    assert cache.software(path, ["master", "a", "b"]).keys() == {2, 3}
    monkeypatch.setattr("allreduce.cache.time", lambda: now + cache.FRESH_S)
    assert cache.software(path, ["master", "a", "b"]) == {}


def test_all_members_choose_alike_and_say_by_what() -> None:
    def node(group: Group) -> Choice:
        assert isinstance(group, Auto)
        choice = group.tune(measure_local=True)
        assert (group.predicted_s(64) or 0) > 0
        assert group.overlaps == choice.overlap
        return choice

    choices = run_group("auto", 3, node, payload_values=(64, 2048))
    assert len({(choice.decode, choice.prefill, choice.overlap) for choice in choices}) == 1
    measured = choices[0].measured
    assert choices[0].overlap == (
        min(halves for _, _, halves in measured.values() if halves)
        < min(whole for _, whole, _ in measured.values() if whole)
    )
    assert choices[0].decode in candidates()
    fields = choices[0].fields()
    assert (fields["decode"], fields["prefill_in_halves"]) == (choices[0].decode, choices[0].overlap)
    assert fields["measured_ms"][choices[0].decode][0] == pytest.approx(1e3 * measured[choices[0].decode][0])
    assert choices[0].name_for(1) == choices[0].decode
    assert choices[0].name_for(10**6) == choices[0].prefill


def test_one_machine_is_not_measured() -> None:
    def node(group: Group) -> Choice:
        assert isinstance(group, Auto)
        return group.tune()

    choices = run_group("auto", 2, node)
    assert [(choice.decode, choice.prefill, choice.overlap) for choice in choices] == [("mesh", "two-shot", False)] * 2
    assert not choices[0].measured


TICK_S = 1e-4


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """A clock for sums that counts a node's own work, and one tick for each reading, however busy the machine is."""
    clock = VirtualTime()

    def look() -> float:
        clock.pass_by(TICK_S)
        return clock.real()

    monkeypatch.setattr(choose, "perf_counter", look)
    return clock


def test_prefill_is_timed_with_what_is_computed_meanwhile(clock: VirtualTime) -> None:
    """The times for prefill include the work, whole or in parts; those for decode do not."""
    takes = 0.02

    def node(group: Group) -> tuple[Choice, list[int]]:
        assert isinstance(group, Auto)
        parts = list[int]()

        def work(part: int) -> None:
            parts.append(part)
            clock.pass_by(takes / part)

        return group.tune(work, measure_local=True), parts

    for choice, parts in run_group("auto", 2, node, payload_values=(64, 2048)):
        assert set(parts) == {1, 2, choose._PROBE}
        timed = [times for times in choice.measured.values() if times[1] and times[2]]
        assert timed
        for decode, whole, halves in timed:
            assert 0 < decode <= TICK_S
            assert whole == pytest.approx(takes, abs=TICK_S)
            assert halves == pytest.approx(takes, abs=TICK_S)


def test_work_too_long_for_one_member_is_rehearsed_by_none(clock: VirtualTime) -> None:
    def node(group: Group) -> tuple[Choice, list[int]]:
        assert isinstance(group, Auto)
        parts = list[int]()

        def work(part: int) -> None:
            parts.append(part)
            clock.pass_by(group.rank * 2 * choose._WORK_S / part)

        return group.tune(work, measure_local=True), parts

    for choice, parts in run_group("auto", 2, node, payload_values=(64, 2048)):
        assert parts == [choose._PROBE] * 2
        assert 0 < min(whole for _, whole, _ in choice.measured.values() if whole) < choose._WORK_S

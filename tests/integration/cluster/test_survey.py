"""The survey: two workers measure the link between them, with or without a plan; known links are remembered."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from allreduce import cache
from master.workers import survey
from master.workers.cluster import Cluster
from master.workers.survey import WorkerLinks, measure
from tests.support.cluster.cluster_helpers import MadeUpModel, fake_worker, fake_workers, step
from tests.support.cluster.key_helpers import locked, pair_folders
from tpi.net.sockets import Net
from tpi.topology.links import Link
from worker.measure.speed import known_disk

Addresses = list[str]


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Addresses]:
    """Three workers, each of which counts as another machine."""
    monkeypatch.setattr(survey, "leaves_machine", lambda host: True)
    with fake_workers([tmp_path / name for name in "abc"]) as (_, addresses):
        yield addresses


def by_address(addresses: Addresses) -> dict[str, str]:
    """Return the names of keyless workers in the cache of links: their addresses on the collective plane."""
    with Cluster.connect(addresses) as cluster:
        return {one.address: one.peer(1).address for one in cluster.workers}


def test_links_are_measured_before_a_plan_and_beside_one(workers: Addresses) -> None:
    model = MadeUpModel()
    with Cluster.connect(workers) as cluster:
        found = measure(cluster, [(0, 1), (0, 2), (1, 2)])
        assert found.keys() == {(0, 1), (0, 2), (1, 2)}
        cluster.dismiss(cluster.workers[2:])
        cluster.assign(model.split(cluster.session, 1, cluster.peers())[1:], model)
        cluster.step(step(cluster.session, 1, 0))
        found |= measure(cluster, [(0, 1)])
        cluster.step(step(cluster.session, 1, 1))
        assert [each.steps for each in cluster.stats()] == [2, 2]
    for link in found.values():
        assert link is not None
        assert 0 < link.latency_s < 0.5
        assert link.bytes_per_s > 1e5


def test_workers_that_do_not_know_each_other_measure_their_link(tmp_path: Path) -> None:
    """The master tells each of them the other's key, which is then admitted on the collective plane only."""
    master, one, other = (tmp_path / name for name in ("master", "one", "other"))
    pair_folders(master, one)
    pair_folders(master, other)
    with ExitStack() as stack:
        addresses = [
            stack.enter_context(fake_worker(tmp_path / folder.name[0], "--keys", str(folder)))[1]
            for folder in (one, other)
        ]
        cluster = stack.enter_context(Cluster.connect(addresses, Net(policy=locked(master))))
        assert measure(cluster, [(0, 1)])[0, 1] is not None
        stranger = replace(cluster.workers[1].hello, collective_port=cluster.workers[1].hello.weights_port)  # type: ignore[union-attr, type-var]
        cluster.workers[1].hello = stranger
        assert measure(cluster, [(0, 1)]) == {(0, 1): None}  # on the weights plane they have no business


def test_a_pair_that_cannot_connect_is_named_once_and_does_not_harm_the_others(
    workers: Addresses, tmp_path: Path
) -> None:
    said: list[str] = []
    links = WorkerLinks(tmp_path / "links.json", say=said.append)
    with socket.socket() as shut, Cluster.connect(workers) as cluster:
        shut.bind(("127.0.0.1", 0))  # nothing listens there
        last = cluster.workers[2]
        assert last.hello
        last.hello = replace(last.hello, collective_port=shut.getsockname()[1])
        ends = [peer.address for peer in cluster.peers()[1:]]
        links.survey(cluster)
        assert links.between(ends).keys() == {(0, 1)}
        assert sorted(sentence.partition(",")[0] for sentence in said) == [
            f"the link between {name} and c cannot be measured" for name in "ab"
        ]
        links.survey(cluster)
        assert len(said) == 2
        assert all(one.problem is None for one in cluster.workers)


def test_known_links_are_kept_until_they_are_measured_again(workers: Addresses, tmp_path: Path) -> None:
    file, names = tmp_path / "made" / "links.json", by_address(workers)
    ends = list(names.values())
    WorkerLinks(file).survey_at(names)
    assert WorkerLinks(file).between(ends).keys() == {(0, 1), (0, 2), (1, 2)}
    known = dict.fromkeys([(0, 1), (0, 2), (1, 2)], Link(0.25, 1e6))
    cache.save(file, ends, known, {})
    again = WorkerLinks(file)
    again.survey_at(names)
    assert again.between(ends) == known
    again.survey_at(names, remeasure=True)
    assert all(link.latency_s < 0.25 for link in again.between(ends).values())
    assert WorkerLinks(file).between(ends) == again.between(ends)
    cache.save(file, ends, known, {})  # a run contradicts what was measured
    assert again.between(ends) == known


def test_workers_of_other_masters_are_left_out_and_those_surveyed_are_free_at_once(workers: Addresses) -> None:
    names = by_address(workers)
    links = WorkerLinks(None)
    with Cluster.connect(workers[2:]):
        links.survey_at(names)
        assert links.between(list(names.values())).keys() == {(0, 1)}
        with Cluster.connect(workers[:2]) as cluster:
            assert len(cluster.workers) == 2


def test_one_machine_and_one_worker_are_not_surveyed(tmp_path: Path) -> None:
    """Nothing listens at these addresses, so that any attempt to connect would be reported."""
    said: list[str] = []
    links = WorkerLinks(tmp_path / "links.json", say=said.append)
    links.survey_at({"127.0.0.1:1": "a", "127.0.0.1:2": "b"})
    links.survey_at({"192.0.2.1:1": "a", "127.0.0.1:2": "b"})
    assert not said
    assert links.between(["a", "b"]) == {}


def test_workers_measure_their_disks_when_they_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no model files in the cache, each worker writes a file to measure with, and removes it."""
    monkeypatch.setenv("TPI_CACHE", str(tmp_path / "user"))
    with fake_workers([tmp_path / name / "shards" for name in "ab"]) as (_, addresses):
        survey.measure_disks(addresses)
        with Cluster.connect(addresses) as cluster:
            assert cluster.workers
    for name in "ab":
        assert known_disk(tmp_path / name) > 1e6
        assert not list((tmp_path / name).glob("disk-*"))

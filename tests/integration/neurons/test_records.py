"""Neurons read from disk one by one: the tokens of the dense run, on one node and on several, within the memory."""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from master.deployment.deployment import Deployment
from scheduler.budget import Budget
from scheduler.demand.records import reader
from scheduler.demand.records.stats import RecordStats
from scheduler.storage.disk import DirectDisk
from scheduler.storage.tune import DiskSpeed
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.neurons import SMALL, relu_packs
from tests.support.devices.offloading import answers, prompts
from tests.support.devices.predicted import all_predictors, exact_predictors
from tests.support.slots import table_faults
from tpi.devices.pages import Bytes
from tpi.errors import WeightsError
from tpi.kernels.spec import Batch
from tpi.pack.reader import Pack
from tpi.sparsity.predictor import Predictor
from worker.demand.records import turns
from worker.plan import records as plans
from worker.plan.case import Candidate, Case
from worker.plan.modes import neurons
from worker.plan.records import RecordPlan, read_by_neuron

TIGHT = 21_700 << 10  # bytes in which the trained model in q8, exact predictors and a context fit, all neurons do not
ONE = Batch(np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros((1, 1), np.int32))
Predictors = Callable[[Pack], dict[int, Predictor]]


def looking_ahead(pack: Pack) -> dict[int, Predictor]:
    """Return predictors that name all neurons, one layer ahead."""
    return all_predictors(pack, 1)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count no memory for the code itself, which takes about as much as this model's weights."""
    monkeypatch.setattr(reader, "_CODE", 0)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return relu_packs(tmp_path_factory.mktemp("trained"))("q8")


def opened(
    pack: Pack, cache: Path, predictors: Mapping[int, Predictor] | None, shares: list[float], **more: Any
) -> Deployment:
    mode = "off" if predictors is None else more.pop("mode", "static")
    return in_process_deployment(pack, shares, cache, predictors=predictors, sparsity=mode, **SMALL | more)


def answered(deployment: Deployment, vocab: int) -> list[list[int]]:
    """Return greedy answers to prompts of one and of several sequences."""
    asked = [prompts(vocab, count, seed=count, longest=20) for count in (1, 4)]
    return [answer for some in asked for answer in answers(deployment, some, 8)]


@pytest.fixture(scope="module")
def expected(pack: Pack, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    with closing(opened(pack, tmp_path_factory.mktemp("dense"), None, [1.0])) as deployment:
        return answered(deployment, pack.config.vocab)


def stats_of(deployment: Deployment) -> RecordStats:
    node = deployment.node.sparse
    assert node is not None
    assert node.records is not None
    return node.records.stats()


def with_slots(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every node read by neurons, with slots for a share of them, whatever its memory."""

    def nothing_resident(case: Case) -> tuple[Budget, DiskSpeed]:
        budget, speed = case.budget(*case.host_part(None))
        return replace(budget, placement=replace(budget.placement, resident=frozenset()), total=1 << 40), speed

    def decided(case: Case) -> Candidate[RecordPlan] | None:
        found = read_by_neuron(case)
        assert found is not None
        assert found.window is not None
        layers = found.details.layers.items()
        records = replace(
            found.details, layers={at: replace(one, slots=int(share * one.neurons) // 32 * 32) for at, one in layers}
        )
        given = replace(found.window.budget, demand_bytes=records.extra_bytes)
        return replace(found, details=records, window=replace(found.window, budget=given))

    monkeypatch.setattr(Case, "host_budget", property(nothing_resident))
    monkeypatch.setattr(neurons, "read_by_neuron", decided)


ALONE, THREE = [1.0], [3.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("predictors", "share", "shares"),
    [
        (all_predictors, 1.0, ALONE), (all_predictors, 0.3, ALONE), (exact_predictors, 0.3, ALONE),
        (exact_predictors, 0.3, THREE), (looking_ahead, 1.0, THREE),
    ],
    ids=["all", "all of it dense", "exact", "three", "three ahead"],
)  # fmt: skip
def test_tokens_are_those_of_the_dense_run(
    predictors: Predictors, share: float, shares: list[float], pack: Pack, expected: list[list[int]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with_slots(share, monkeypatch)
    with closing(opened(pack, tmp_path, predictors(pack), shares)) as deployment:
        assert answered(deployment, pack.config.vocab) == expected
        stats = stats_of(deployment)
        if share == 1.0:
            assert stats.requested == stats.found > 0  # all that there is was there from the start
        elif predictors is exact_predictors:
            assert 0 < stats.found < stats.requested
            assert stats.read_bytes > 0
        else:
            assert stats.requested == 0  # more than there are slots for: all of it passes through the window


def test_what_does_not_fit_is_read_within_the_memory(pack: Pack, expected: list[list[int]], tmp_path: Path) -> None:
    node = opened(pack, tmp_path, exact_predictors(pack), [1.0], memory=TIGHT, scheduler="window")
    with closing(node) as deployment:
        assert answered(deployment, pack.config.vocab) == expected
        budget, stats = deployment.node.budget, stats_of(deployment)
        assert budget.used <= TIGHT
        assert budget.demand_bytes > 0
        assert 0.3 < stats.hit_rate < 1
        figures = deployment.node.figures()
        assert "found in memory" in figures.accelerator
        assert figures.streamed_bytes >= stats.read_bytes > 0


@pytest.mark.parametrize("pays", [False, True])
def test_both_ways_share_one_memory_with_the_same_tokens(
    pays: bool, pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "TURN", 4)
    monkeypatch.setattr(turns, "WARM", 1)
    monkeypatch.setattr(turns, "median", lambda times: len(times))  # as many of each: neither is less
    monkeypatch.setattr(turns.TurnsJudge, "faster", lambda judge: pays)
    asked = prompts(pack.config.vocab, 1, seed=3, longest=20)
    with closing(opened(pack, tmp_path / "dense", None, [1.0])) as deployment:
        plain = answers(deployment, asked, 30)
    node = opened(pack, tmp_path, exact_predictors(pack), [1.0], memory=TIGHT, scheduler="window", mode="auto")
    with closing(node) as deployment:
        assert answers(deployment, asked, 30) == plain
        judged, window = deployment.node.sparse, deployment.node.window
        assert judged is not None
        assert judged.records is not None
        assert judged.judge.predicting_is_faster() is pays
        assert judged.records.stats().requested > 0
        kept = window.placement.resident_bytes
        with_slots = any(len(layer.table) for layer in judged.records.layers)
        assert with_slots is pays
        assert deployment.node.budget.used <= TIGHT
        deployment.node.loop.weights.begin(1)
        assert window.placement.resident_bytes == kept


def test_all_in_memory_is_not_read_by_neurons(pack: Pack, tmp_path: Path) -> None:
    node = opened(pack, tmp_path, exact_predictors(pack), [1.0], memory=1 << 30, scheduler="window")
    with closing(node) as deployment:
        assert deployment.node.sparse is not None
        assert deployment.node.sparse.records is None


def test_too_few_slots_are_a_plain_window(pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "LEAST", 0.9)
    node = opened(pack, tmp_path, exact_predictors(pack), [1.0], memory=TIGHT, scheduler="window")
    with closing(node) as deployment:
        assert deployment.node.sparse is not None
        assert deployment.node.sparse.records is None
        assert deployment.node.budget.placement.streamed_bytes > 0


class Failing(DirectDisk):
    """A disk that fails on request."""

    broken = False

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        if self.broken:
            raise OSError(5, "Input/output error")
        return super().read(path, offset, into)


def test_a_failed_read_names_the_file_and_the_next_step_goes_on(
    pack: Pack, expected: list[list[int]], tmp_path: Path
) -> None:
    disk = Failing(threads=2)
    how: dict[str, Any] = {"memory": TIGHT, "scheduler": "window", "disk": disk, "verify_weights": True}
    with closing(opened(pack, tmp_path, exact_predictors(pack), [1.0], **how)) as deployment:
        random = np.random.default_rng(0)
        disk.broken = True
        xs = random.standard_normal((20, 1, pack.config.hidden), np.float32)
        with pytest.raises(WeightsError, match="could not be read"):
            deque((deployment.node.loop.forward(x, ONE, step) for step, x in enumerate(xs)), maxlen=0)
        disk.broken = False
        node = deployment.node.sparse
        assert node is not None
        assert node.records is not None
        assert not any(layer.table.pins.any() or table_faults(layer.table) for layer in node.records.layers)
        assert answered(deployment, pack.config.vocab) == expected

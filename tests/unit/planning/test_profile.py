"""A node's profile: a plan that the master makes from it is the one that the node makes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from master.deployment.deploy import Deployer
from master.options import RunOptions
from tests.support.cluster.cluster_helpers import HIDDEN, MadeUpModel
from tpi.devices.host import open_host
from tpi.errors import PlanError
from tpi.kernels.memory import slice_bytes
from tpi.net.fields import Profile
from tpi.net.messages import Assign, NodeOptions, PeerAddress
from worker import profile
from worker.equipment import Equipment
from worker.node_plan import node_plan
from worker.plan.fit import Tables, fit, need
from worker.profile import limit_options, measure_machine, memory_budget, peak_rss, reset_peak

MIB = 1 << 20
PEERS = (PeerAddress(0, "master", ""), PeerAddress(1, "laptop", "tcp://192.0.2.1:9991"))
OPTIONS = NodeOptions(context=64, pages=2, kv_dtype="f32", prefill_tokens=64, scheduler="window")


def laptop(threads: int = 2, free: int = 0, limit: int = 0) -> Profile:
    return Profile("laptop", "Linux x86_64", 4, threads, 16 << 30, free, limit, 40 * MIB, 1 << 40)


def test_what_is_advertised_is_what_the_node_allows_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "default_budget", lambda: 700 * MIB)  # of a control group, on a larger machine
    free, told = measure_machine(tmp_path, 0, 0), measure_machine(tmp_path, 3, 600 * MIB)
    assert (memory_budget(free), memory_budget(told)) == (700 * MIB, 600 * MIB)
    assert (free.threads, told.threads) == (free.cores, 3)


@pytest.mark.parametrize(
    ("asked", "found", "expected"),
    [
        ((0, 0), laptop(4, free=900), (900, 4)),
        ((0, 0), laptop(4, free=900, limit=500), (500, 4)),
        ((600, 1), laptop(4, free=900, limit=800), (600, 1)),
        ((600, 8), laptop(4, free=500), (500, 4)),
        ((0, 0), laptop(4, free=0), (1, 4)),
    ],
)
def test_wishes_end_at_the_nodes_own_limits(asked: tuple[int, int], found: Profile, expected: tuple[int, int]) -> None:
    options = limit_options(replace(OPTIONS, memory=asked[0], threads=asked[1]), found)
    assert (options.memory, options.threads) == expected
    assert replace(options, memory=0, threads=0) == OPTIONS


def checked(plans: list[Assign], found: Profile) -> None:
    """Check `plans` as the master does, for itself and for a worker with this profile."""
    cluster: Any = SimpleNamespace(peers=lambda master: PEERS, hellos=[SimpleNamespace(profile=found)])
    pack: Any = SimpleNamespace(layers=(), config=SimpleNamespace(activation="silu"), path=Path("model"))
    Deployer(RunOptions("model"), cluster, pack, 64, Equipment(open_host()), lambda: None)._check_memory(plans)


def test_the_master_plans_with_the_workers_threads_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("master.deployment.deploy.table_bytes", lambda pack: Tables(0, 0))
    monkeypatch.setattr("worker.plan.fit.usable_cores", lambda: 64)  # of the machine that checks
    monkeypatch.setattr("worker.plan.fit.default_budget", lambda: 1 << 40)
    plans = [replace(plan, options=OPTIONS) for plan in MadeUpModel().split(1, 1, PEERS, cut=8)]
    two, many = (need(node_plan(replace(plans[1], options=replace(OPTIONS, threads=count)))).fixed for count in (2, 64))
    assert many - two == slice_bytes(HIDDEN, 64) - slice_bytes(HIDDEN, 2) > 0
    enough = next(size for size in range(two, many, 4096) if fits(plans[1], size))
    checked(plans, laptop(free=enough))
    for found in (laptop(free=enough - 4096), laptop(threads=64, free=enough), laptop(free=0)):
        with pytest.raises(PlanError, match=r"^laptop: .* is too little for this part of the model"):
            checked(plans, found)


def fits(plan: Assign, size: int) -> bool:
    """Return True if the worker would accept `plan` with two threads and `size` bytes."""
    try:
        fit(node_plan(replace(plan, options=limit_options(OPTIONS, laptop(free=size)))))
    except PlanError:
        return False
    return True


def test_a_peak_that_cannot_be_reset_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_CLEAR_REFS", tmp_path / "no" / "such" / "file")
    before = peak_rss()
    reset_peak()
    assert peak_rss() >= before

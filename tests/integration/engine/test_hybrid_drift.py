"""Another process takes the CPU half way: costs and thresholds follow, tokens stay those of the dense run."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from master.generation.engine import Engine
from master.generation.request import Request, Sampled
from master.generation.sampler import Sampler, Sampling
from scheduler.model.machine import emulated_node
from scheduler.neurons.moving import Moving
from scheduler.neurons.thresholds import NeuronShares
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.neurons import SMALL, Exact, relu_packs, scorers
from tpi.devices.emulated.device import open_emulated
from tpi.devices.host import open_host
from tpi.pack.reader import Pack
from worker.equipment import Beside
from worker.neurons.accelerated import NeuronAccelerated
from worker.neurons.plan import NeuronSetup, decide_neurons

MACHINE = "64MiB,link=1GB/s,memory=40MB/s,host_memory=30MB/s,latency=0us,launch=1us,stretch=1"
TOKENS, SLOWER = 22, 4.0


@dataclass(frozen=True, eq=False)
class Graded(Exact):
    """Scores that grow with the gate's value: neurons just below the threshold have a chance, too."""

    def scores(self, x: Any, /) -> Any:
        assert self.weights.gate is not None
        return np.asarray(4 * (x @ self.weights.gate.T), np.float32)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return relu_packs(tmp_path_factory.mktemp("relu"))("f32")


def generate(engine: Engine) -> Callable[[int], list[int]]:
    """Goes on with one sequence by so many tokens."""
    found: list[int] = []

    def take(sampled: Sampled) -> bool:
        found.append(sampled.token)
        return True

    engine.submit(Request(engine.admit([60, 61, 62]), Sampler(Sampling(temperature=0)), 500, take))

    def more(count: int) -> list[int]:
        until = len(found) + count
        while len(found) < until:
            engine.step()
        return list(found)

    return more


def test_costs_and_thresholds_follow_and_tokens_stay(
    pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(in_process_deployment(pack, [1], tmp_path / "dense", **SMALL)) as deployment:
        expected = generate(Engine(deployment))(2 * TOKENS)
    random = np.random.default_rng(3)
    frequency = {layer: random.random(pack.config.intermediate) for layer in range(pack.config.layers)}
    neurons = sum(block.shape.nbytes for _, block in pack.layers)
    setup = NeuronSetup(frequency, scorers=scorers(pack, Graded), moving=Moving(migrate=False), most=neurons // 2)
    told: list[NeuronShares] = []
    with closing(open_emulated(MACHINE)) as card:
        emulation = card.emulation
        decide: Any = partial(decide_neurons, setup=setup)
        beside = Beside(card, emulated_node(emulation.machine), decide=decide)
        host = emulation.host(open_host())
        with closing(
            in_process_deployment(
                pack, [1], tmp_path / "sparse", accelerators={0: beside}, host=host, trace=True, **SMALL
            )
        ) as deployment:
            link = deployment.node.link
            assert isinstance(link, NeuronAccelerated)
            assert link.arena is not None
            meter, said = link.arena.meter, link.arena.meter.thresholds

            def thresholds(shares: NeuronShares) -> None:
                told.append(shares)
                said(shares)

            monkeypatch.setattr(meter, "thresholds", thresholds)
            more = generate(Engine(deployment))
            more(TOKENS)
            before, half = meter.costs.here.line, len(told)
            emulation.processor.slowed = SLOWER
            found = more(TOKENS)
            after = meter.costs.here.line
            spans = {name for kind, name, _, _ in deployment.node.trace.rows if kind == "compute"}
    assert before is not None
    assert after is not None
    assert meter.costs.here.drifts >= 1
    assert after.seconds(20) > 2 * before.seconds(20)
    mean = [np.mean([min(9.0, shares.threshold_here) for shares in part[-8:]]) for part in (told[:half], told)]
    assert mean[1] > mean[0]  # the CPU is left less
    assert all(shares.lost <= 1e-9 for shares in told)  # within the one threshold's error
    assert any(name.startswith("CPU drifted") for name in spans)
    assert any(name.startswith("thresholds") for name in spans)
    same = sum(one == other for one, other in zip(found, expected, strict=True))
    assert same >= 0.9 * len(expected)

"""Another process takes the CPU halfway: costs and thresholds adapt, and tokens stay those of the dense run."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from master.generation.engine import Engine
from master.generation.request import Request, Sampled
from master.vocabulary.sampler import Sampler, Sampling
from scheduler.model.machine import emulated_node
from scheduler.neurons.arena import NeuronArena
from scheduler.neurons.costs import FittedCost
from scheduler.neurons.migration import MigrationSettings
from scheduler.neurons.thresholds import NeuronShares
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.neurons import Exact, relu_packs, scorers
from tests.support.processes.priority import may_prioritise, taken, undisturbed
from tpi.devices.emulated.device import EmulatedDevice, open_emulated
from tpi.devices.emulated.machine import parse_emulated
from tpi.devices.host import HostDevice, open_host
from tpi.kernels.native import NativeKernels
from tpi.kernels.spec import F32, I32, U8, FfnSpec, Input
from tpi.pack.reader import Pack
from worker.equipment import AcceleratorSetup
from worker.neurons.accelerated import NeuronAccelerated
from worker.plan.choose import Choose
from worker.plan.modes.neurons import NeuronSetup, plan_on_accelerator

MACHINE = "64MiB,link=1GB/s,memory=40MB/s,host_memory=30MB/s,latency=0us,launch=1us,stretch=1"
TAKEN = MACHINE.replace("memory=40MB", "memory=10MB")  # a neuron takes it as long as the CPU that is not disturbed
ROOM: dict[str, Any] = {"context": 256, "pool": 96}
TOKENS, SLOWER = 22, 4.0
FEW, PATIENCE = 4, 40  # tokens after something has changed, and that it may take until it is noticed
LARGER = 1600  # times that a neuron is computed, all in one call: calls of some 4 ms, which a process can interrupt


class Enlarged(NativeKernels):
    """Kernels whose work counts as that of a model several times as large; results do not change."""

    def ffn(self, spec: FfnSpec, data: U8, x: Input, active: I32 | None = None) -> F32:
        tokens = x if isinstance(x, np.ndarray) else x.values()
        found = super().ffn(spec, data, np.repeat(tokens, LARGER, axis=0), active)
        return np.ascontiguousarray(found[::LARGER])


@dataclass(frozen=True, eq=False)
class Graded(Exact):
    """Scores that grow with the gate's value, so that neurons just below the threshold may be active, too."""

    def scores(self, x: Any, /) -> Any:
        assert self.weights.gate is not None
        return np.asarray(4 * (x @ self.weights.gate.T), np.float32)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return relu_packs(tmp_path_factory.mktemp("relu"))("f32")


def generate(engine: Engine) -> Callable[[int], list[int]]:
    """Continue one sequence by a number of tokens."""
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


@dataclass(frozen=True, eq=False)
class Watched:
    """A node that generates with neurons on both sides, and records the thresholds of its first layer."""

    more: Callable[[int], list[int]]
    arena: NeuronArena
    told: list[NeuronShares]
    trace: Any

    @property
    def here(self) -> FittedCost:
        """The cost of neurons on the CPU."""
        return self.arena.meter.costs.cpu

    @property
    def seconds(self) -> float:
        """The fitted seconds of 60 neurons on the CPU, which are about as many as it computes."""
        assert self.here.line is not None
        return self.here.line.seconds(60)

    def left(self) -> float:
        """Return the CPU's recent threshold; the higher it is, the fewer neurons the CPU computes."""
        return float(np.mean([min(9.0, shares.cpu_threshold) for shares in self.told[-8:]]))

    def spans(self) -> set[str]:
        """Return the names of spans in the trace, except transfers."""
        return {name for kind, name, _, _ in self.trace.rows if kind == "compute"}


@contextmanager
def watched(
    pack: Pack, cache: Path, card: EmulatedDevice, host: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Watched]:
    random = np.random.default_rng(3)
    frequency = {layer: random.random(pack.config.intermediate) for layer in range(pack.config.layers)}
    neurons = sum(block.shape.nbytes for _, block in pack.layers)
    setup = NeuronSetup(
        frequency, scorers=scorers(pack, Graded), migration=MigrationSettings(migrate=False), max_bytes=neurons // 2
    )
    decide: Choose = partial(plan_on_accelerator, setup=setup)
    beside = {0: AcceleratorSetup(card, emulated_node(parse_emulated(MACHINE)), choose=decide)}
    made = in_process_deployment(pack, [1], cache, accelerators=beside, host=host, trace=True, **ROOM)
    with closing(made) as deployment:
        link = deployment.node.link
        assert isinstance(link, NeuronAccelerated)
        assert link.arena is not None
        told, say = list[NeuronShares](), link.arena.meter.thresholds

        def thresholds(shares: NeuronShares) -> None:
            told.append(shares)
            say(shares)

        monkeypatch.setattr(link.arena.meter, "thresholds", thresholds)
        yield Watched(generate(Engine(deployment)), link.arena, told, deployment.node.trace)


def check_error(found: list[int], told: list[NeuronShares], pack: Pack, cache: Path) -> None:
    """Check that left-out neurons stay within one threshold's error, and that tokens are those of a dense run."""
    assert all(shares.lost <= 1e-9 for shares in told)
    with closing(in_process_deployment(pack, [1], cache, **ROOM)) as deployment:
        engine = Engine(deployment)
        engine.drafts = False  # a step of drafts yields several tokens
        expected = generate(engine)(len(found))
    same = sum(one == other for one, other in zip(found, expected, strict=True))
    assert same >= 0.9 * len(expected)


def test_costs_and_thresholds_follow_and_tokens_stay(
    pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In emulated time, the CPU becomes a quarter as fast halfway."""
    with closing(open_emulated(MACHINE)) as card:
        host = card.emulation.host(open_host())
        with watched(pack, tmp_path / "sparse", card, host, monkeypatch) as node:
            node.more(TOKENS)
            before, left = node.seconds, node.left()
            card.emulation.processor.slowed = SLOWER
            found = node.more(TOKENS)
            assert node.here.drifts >= 1
            assert node.seconds > 2 * before
            assert node.left() > left
            assert any(name.startswith("CPU drifted") for name in node.spans())
            assert any(name.startswith("thresholds") for name in node.spans())
    check_error(found, node.told, pack, tmp_path / "dense")


@pytest.mark.alone
@pytest.mark.skipif(not may_prioritise(), reason="needs real-time priorities")
def test_another_process_takes_the_cpu_and_gives_it_back(
    pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In real time, the CPU computes in a thread that only one other process can disturb."""
    kernels = Enlarged()
    threads = kernels.threads()
    with closing(open_emulated(TAKEN)) as card, undisturbed() as core:
        kernels.set_threads(1)  # this one
        try:
            with watched(pack, tmp_path / "sparse", card, HostDevice(kernels), monkeypatch) as node:
                node.more(2 * FEW)
                before, left = node.seconds, node.left()
                with taken(core):
                    assert _until(node, lambda: node.here.drifts > 0 and node.seconds > 2 * before)
                    assert _until(node, lambda: node.left() > left)
                    assert any(name.startswith("CPU drifted") for name in node.spans())
                    assert any(name.startswith("thresholds") for name in node.spans())
                assert _until(node, lambda: node.seconds < 1.5 * before)
                found = node.more(FEW)
        finally:
            kernels.set_threads(threads)
    check_error(found, node.told, pack, tmp_path / "dense")


def _until(node: Watched, adapted: Callable[[], bool]) -> bool:
    """Return True if the node adapts within a number of tokens."""
    return any(node.more(1) and adapted() for _ in range(PATIENCE))

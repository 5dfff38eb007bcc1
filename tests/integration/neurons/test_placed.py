"""The place of predictors: on the accelerator or in the host's memory, as the integer program decides."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from master.deployment.deployment import Deployment
from scheduler.model.machine import LAPTOP, Accelerator, NodeMachine
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.neurons import SMALL, relu_packs
from tests.support.devices.offloading import answers, prompts
from tests.support.devices.predicted import all_predictors, exact_predictors
from tpi.devices.emulated.device import EmulatedDevice, open_emulated
from tpi.devices.options import OffloadOptions
from tpi.errors import PlanError
from tpi.pack.reader import Pack
from tpi.sparsity.predictor import Predictor
from worker.equipment import AcceleratorSetup
from worker.neurons import accelerated
from worker.neurons.accelerated import NeuronAccelerated
from worker.plan.modes.neurons import NeuronArenas, placed_bytes

LARGE = 64 << 20


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return relu_packs(tmp_path_factory.mktemp("relu"))("q8")


def looking_ahead(pack: Pack) -> dict[int, Predictor]:
    """Return predictors that name all neurons, one layer ahead."""
    return all_predictors(pack, 1)


@pytest.fixture(scope="module")
def asked(pack: Pack) -> list[list[int]]:
    return prompts(pack.config.vocab, 2, seed=5, longest=40)


@pytest.fixture(scope="module")
def expected(pack: Pack, asked: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    with closing(in_process_deployment(pack, [1], tmp_path_factory.mktemp("dense"), **SMALL)) as deployment:
        return answers(deployment, asked, 12)


@pytest.fixture(autouse=True)
def _believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the node compute neurons by their list, however many are active."""
    monkeypatch.setattr(accelerated, "measure_limit", lambda *_: inf)


def at_once() -> NodeMachine:
    """Return a laptop whose calls and copies begin at once; otherwise so small a model would never use both sides."""

    def begun(card: Accelerator) -> Accelerator:
        return replace(card, rates=replace(card.rates, start=0.0), link=replace(card.link, latency=0.0))

    return replace(LAPTOP.with_cards(begun), host=replace(LAPTOP.host, start=0.0))


@contextmanager
def deployed(
    pack: Pack, cache: Path, predictors: dict[int, Predictor], machine: NodeMachine, memory: int, sparsity: str
) -> Iterator[tuple[Deployment, EmulatedDevice, NeuronAccelerated]]:
    with closing(open_emulated(f"{memory}B,stretch=1")) as card:
        more: dict[str, Any] = {"predictors": predictors, "sparsity": sparsity, **SMALL}
        beside = {0: AcceleratorSetup(card, machine)}
        with closing(in_process_deployment(pack, [1], cache, accelerators=beside, **more)) as deployment:
            link = deployment.node.link
            assert isinstance(link, NeuronAccelerated)
            yield deployment, card, link
        assert card.memory.used == 0


def arenas(deployment: Deployment) -> NeuronArenas:
    found = deployment.node._residence.details
    assert isinstance(found, NeuronArenas)
    return found


def planned(deployment: Deployment, pack: Pack, predictors: dict[int, Predictor]) -> int:
    """Return the bytes of the accelerator's memory that the plan predicts."""
    plan, offload = arenas(deployment), deployment.node.offload
    assert offload is not None
    kept = sum(placed_bytes(predictors[layer]) for layer in plan.predictors_on_accelerator)
    assert plan.placement.nbytes(plan.neurons) <= plan.neurons.accelerator.capacity
    assert [one.predictor_bytes for one in plan.neurons.layers] == [placed_bytes(one) for one in predictors.values()]
    neurons = sum(
        len(chosen) // 32 * 32 * layer.neuron_bytes
        for chosen, layer in zip(plan.placement.neurons, plan.neurons.layers, strict=True)
    )
    return offload.memory_bytes + kept + neurons


def needed(pack: Pack, cache: Path, predictors: dict[int, Predictor]) -> tuple[int, int]:
    """Return the bytes of an accelerator's memory without neurons and predictors, and of these."""
    with deployed(pack, cache, predictors, at_once(), LARGE, "static") as (deployment, _, _):
        plan = arenas(deployment)
        assert len(plan.predictors_on_accelerator) == pack.config.layers
        return LARGE - plan.neurons.accelerator.capacity, plan.placement.nbytes(plan.neurons)


@pytest.mark.parametrize("sparsity", ["static", "dynamic"])
@pytest.mark.parametrize("made", [exact_predictors, looking_ahead], ids=["exact", "all, a layer ahead"])
@pytest.mark.parametrize("share", [1.0, 0.35, 0.0], ids=["all there", "some there", "none there"])
def test_tokens_do_not_depend_on_where_predictors_lie(
    share: float, made: Callable[[Pack], dict[int, Predictor]], sparsity: str, pack: Pack, asked: list[list[int]],
    expected: list[list[int]], tmp_path: Path,
) -> None:  # fmt: skip
    predictors = made(pack)
    fixed, both = needed(pack, tmp_path, predictors)
    memory = fixed + int(share * both)
    with deployed(pack, tmp_path, predictors, at_once(), memory, sparsity) as (deployment, card, link):
        there = link._neurons.predictors_on_accelerator
        assert min(1, len(there)) + (len(there) == pack.config.layers) == {1.0: 2, 0.35: 1, 0.0: 0}[share]
        used = planned(deployment, pack, predictors)
        assert used <= card.memory.used <= 1.1 * used
        assert answers(deployment, asked, 12) == expected
        assert f"{len(there)} of {pack.config.layers} predictors lie on it" in link.describe()
        assert link.arena is not None
        every = pack.config.layers * pack.config.intermediate * deployment.node.loop.clock.steps
        active = link.arena.figures.active
        assert active == every if made is looking_ahead else 0 < active < 0.5 * every


def test_nothing_is_on_the_card_where_no_exchange_pays(pack: Pack, tmp_path: Path) -> None:
    predictors = exact_predictors(pack)
    with deployed(pack, tmp_path, predictors, LAPTOP, LARGE, "static") as (deployment, card, link):
        plan = deployment.node.offload
        assert plan is not None
        assert not arenas(deployment).predictors_on_accelerator
        assert plan.memory_bytes <= card.memory.used <= 1.1 * plan.memory_bytes
        assert "other blocks and 0 of 3072 neurons; " in link.describe()


FLAGS = [
    (OffloadOptions(weights="ram"), "--weights ram"),
    (OffloadOptions(pipeline="memory"), "--pipeline memory"),
    (OffloadOptions(pipeline="batch"), "--pipeline batch"),
    (OffloadOptions(crossover=4), "--crossover 4"),
]


@pytest.mark.parametrize(("options", "flag"), FLAGS, ids=[flag for _, flag in FLAGS])
@pytest.mark.parametrize("sparsity", ["static", "dynamic"])
def test_flags_that_leave_no_neurons_to_divide_are_refused(
    sparsity: str, options: OffloadOptions, flag: str, pack: Pack, tmp_path: Path
) -> None:
    said = rf"--sparsity {sparsity} cannot be combined with {flag}: .*; remove {flag.split()[0]} or --sparsity"
    more: dict[str, Any] = {"predictors": exact_predictors(pack), **SMALL}
    with closing(open_emulated(f"{LARGE}B,stretch=1")) as card:
        beside = {0: AcceleratorSetup(card, at_once(), options)}
        with pytest.raises(PlanError, match=said):
            in_process_deployment(pack, [1], tmp_path, accelerators=beside, sparsity=sparsity, **more)


def test_keys_and_values_lie_where_the_user_says(
    pack: Pack, asked: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    more: dict[str, Any] = {"predictors": exact_predictors(pack), "sparsity": "static", **SMALL}
    with closing(open_emulated(f"{LARGE}B,stretch=1")) as card:
        beside = {0: AcceleratorSetup(card, at_once(), OffloadOptions(kv="ram"))}
        with closing(in_process_deployment(pack, [1], tmp_path, accelerators=beside, **more)) as deployment:
            assert answers(deployment, asked, 12) == expected
            assert deployment.node.link is not None
            assert "keys and values are in memory" in deployment.node.link.describe()

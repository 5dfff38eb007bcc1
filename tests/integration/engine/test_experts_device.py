"""A node whose accelerator loads some of its experts on demand has the tokens of a run without accelerator."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from master.deployment.deployment import Deployment
from scheduler.model.machine import Rates
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.demanding import DEMAND, SMALL, arena_of, at_once, limit_for, slots_for_share
from tests.support.devices.offloading import answers, prompts
from tests.support.devices.opencl_device import opencl_device
from tests.support.devices.twin import Twin
from tpi.devices.base import Device, Event
from tpi.devices.emulated.device import open_emulated
from tpi.devices.host import open_host
from tpi.devices.options import OffloadOptions, Pipelining
from tpi.devices.pages import Bytes
from tpi.errors import DeviceError, PlanError
from tpi.kernels import Kernels
from tpi.pack.reader import Pack
from tpi.pack.routing import NAME, RoutingRecord, save_routing
from worker.equipment import AcceleratorSetup
from worker.plan.case import Candidate, Case
from worker.plan.modes.experts import CardSlots

CARD = "64MiB,stretch=1"
THIRD = 1 / 3
Packs = Callable[..., Pack]
CASES = [
    ("emulated", "olmoe", "f32", 0.01, None),
    ("emulated", "qwen2moe", "q4", 1.0, 32),
    ("emulated", "mixtral", "q8", 100.0, 32),
    ("emulated", "gptoss", "f32", 100.0, 4),
    ("opencl", "qwen2moe", "f32", 100.0, 4),
    ("opencl", "olmoe", "q4", 1.0, 4),
]


@contextmanager
def beside(pack: Pack, cache: Path, device: Device, how: AcceleratorSetup) -> Iterator[Deployment]:
    """Yield a node with the accelerator `device`; check at the end that the device's memory is empty."""
    with closing(in_process_deployment(pack, [1], cache, accelerators={0: how}, **SMALL)) as deployment:
        yield deployment
    assert device.memory.used == 0


def on_the_host(pack: Pack, cache: Path, asked: list[list[int]], shares: tuple[int, ...] = (1,)) -> list[list[int]]:
    with closing(in_process_deployment(pack, shares, cache, **SMALL)) as deployment:
        return answers(deployment, asked, 12)


@pytest.mark.parametrize(("device", "family", "dtype", "link", "crossover"), CASES)
def test_tokens_equal_the_run_without(
    device: str, family: str, dtype: str, link: float, crossover: int | None, tiny_pack: Packs, tmp_path: Path
) -> None:
    """Over slow links the CPU computes missing experts, over fast links they are fetched.

    Prompts may stream all experts.
    """
    pack = tiny_pack(family, dtype)
    asked = prompts(pack.config.vocab, 3, seed=5)
    expected = on_the_host(pack, tmp_path / "host", asked)
    with closing(open_emulated(CARD)) if device == "emulated" else opencl_device() as card:
        how = AcceleratorSetup(card, at_once(link), DEMAND, slots_for_share(THIRD, crossover))
        with beside(pack, tmp_path / "device", card, how) as deployment:
            assert answers(deployment, asked, 12) == expected
            arena, plan, node = arena_of(deployment.node), deployment.node.offload, deployment.node
            assert plan is not None
            assert node.mode == "experts"
            stats = arena.cache.stats()
            assert min(stats.hits, stats.elsewhere) > 0
            assert stats.misses > 0 if link > 1 else link == 1 or not stats.misses
            assert card.memory.used <= plan.memory_bytes <= 1.1 * card.memory.used
            told = node.figures().accelerator
            assert "holds all weights but the routed experts" in told
            assert f"{stats.hit_rate:.0%} of the chosen experts were there (Belady's policy: " in told
            assert f"the CPU computed {stats.elsewhere / stats.uses:.0%}; " in told
            assert f"{stats.bytes_per_step / 1e6:.2f} MB crossed the link per step" in told
            assert not arena.cache.shelf.table.pins.any()


def test_three_nodes_with_different_devices(tiny_pack: Packs, tmp_path: Path) -> None:
    """An emulated card with experts on demand, a node without card, and a card that holds all of the node's weights."""
    pack, shares = tiny_pack("qwen2moe"), (2, 1, 1)
    asked = prompts(pack.config.vocab, 2, seed=3)
    expected = on_the_host(pack, tmp_path / "host", asked, shares)
    with closing(open_emulated(CARD)) as card, Twin(open_host().kernels, 64 << 20) as twin:
        accelerators = {
            0: AcceleratorSetup(card, at_once(100.0), DEMAND, slots_for_share(THIRD, 32)),
            2: AcceleratorSetup(twin, at_once(), OffloadOptions(weights="gpu")),
        }
        made = in_process_deployment(pack, shares, tmp_path / "device", accelerators=accelerators, **SMALL)
        with closing(made) as deployment:
            assert answers(deployment, asked, 12) == expected
            assert arena_of(deployment.node).cache.stats().hits > 0
            assert twin.memory.used > 0
        assert card.memory.used == twin.memory.used == 0


class Fragile(Twin):
    """A device whose copies fail on request."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels, 64 << 20)
        self.failing = False

    def __enter__(self) -> "Fragile":
        return self

    def copy(self, source: Bytes, target: Bytes) -> Event:
        if self.failing:
            raise DeviceError("the card fell off the bus")
        return super().copy(source, target)


def answer_until_it_fails(deployment: Deployment, asked: list[list[int]]) -> None:
    """Ask again until an answer fails: on a busy machine, an answer may end before a copy for later tokens begins."""
    for _ in range(1000):
        answers(deployment, asked, 12)


@pytest.mark.parametrize("link", [0.01, 100.0])
def test_a_copy_that_fails_is_named_and_the_next_step_goes_on(link: float, tiny_pack: Packs, tmp_path: Path) -> None:
    """Over a fast link a step waits for the copy. Over a slow link, the copy is for a later token."""
    pack = tiny_pack("olmoe")
    asked = [list(range(3, 9))]
    expected = on_the_host(pack, tmp_path / "host", asked)
    with Fragile(open_host().kernels) as card:
        how = AcceleratorSetup(card, at_once(link), DEMAND, slots_for_share(THIRD, 32))
        with beside(pack, tmp_path / "device", card, how) as deployment:
            card.failing = True
            with pytest.raises(DeviceError, match=r"expert \d of block \d cannot be copied to twin: the card fell off"):
                answer_until_it_fails(deployment, asked)
            arena_of(deployment.node).cache.slots.drain()  # the next step would wait for a copy that still fails
            card.failing = False
            assert answers(deployment, asked, 12) == expected
            assert not arena_of(deployment.node).cache.shelf.table.pins.any()


def test_a_card_that_cannot_be_filled_gives_everything_back(tiny_pack: Packs, tmp_path: Path) -> None:
    with Fragile(open_host().kernels) as card:
        how = AcceleratorSetup(card, at_once(), DEMAND, slots_for_share(THIRD))
        card.failing = True
        with (
            pytest.raises(DeviceError, match="the card fell off the bus"),
            beside(tiny_pack("olmoe"), tmp_path, card, how),
        ):
            pytest.fail("it was built")
        assert card.memory.used == 0


def test_recorded_routing_chooses_first_experts_and_policy(tiny_pack: Packs, tmp_path: Path) -> None:
    pack = tiny_pack("olmoe")
    experts = np.tile(np.array([[[1, 4, 5], [0, 2, 3]]], np.uint16), (64, 1, 1))
    save_routing(pack.path / NAME, RoutingRecord("a text", 64, experts))
    try:
        with closing(open_emulated(CARD)) as card:
            how = AcceleratorSetup(card, at_once(), DEMAND, slots_for_share(0.5))
            with beside(pack, tmp_path, card, how) as deployment:
                arena, blocks = arena_of(deployment.node), deployment.node.loop.blocks
                first, second = (block.number for block in blocks if block.name.startswith("experts"))
                for block, chosen in ((first, {1, 4, 5}), (second, {0, 2, 3})):
                    held = arena.cache.present([(block, expert) for expert in range(6)])
                    assert {expert for _, expert in held.ready} == chosen
                    held.close()
                assert "hits in the recorded routing" in arena.describe()
    finally:
        (pack.path / NAME).unlink()


@pytest.mark.parametrize(("pipeline", "share", "demanded"), [("auto", 0.5, True), ("performance", 0.5, False),
                                                              ("auto", 1.0, False)])  # fmt: skip
def test_auto_loads_experts_on_demand_where_that_is_faster(
    pipeline: Pipelining, share: float, demanded: bool, tiny_pack: Packs, tmp_path: Path
) -> None:
    """Not if all experts fit on the card, and not if another way was requested. The card's memory limit is kept."""
    pack = tiny_pack("qwen2moe")
    asked = prompts(pack.config.vocab, 1, seed=2)
    expected = on_the_host(pack, tmp_path / "host", asked)
    figures = replace(at_once(0.02), host=Rates(1e8, 1e9))
    decided: list[Case] = []

    def note(case: Case) -> Candidate[CardSlots]:
        decided.append(case)
        raise PlanError("seen")

    with (
        closing(open_emulated(CARD)) as card,
        pytest.raises(PlanError, match="seen"),
        beside(pack, tmp_path / "device", card, AcceleratorSetup(card, figures, choose=note)),
    ):
        pytest.fail("it was built")
    limit = limit_for(share, decided[0])
    with closing(open_emulated(CARD, limit)) as card:
        how = AcceleratorSetup(card, figures, OffloadOptions(pipeline=pipeline))
        with beside(pack, tmp_path / "device", card, how) as deployment:
            assert answers(deployment, asked, 12) == expected
            plan = deployment.node.offload
            assert plan is not None
            assert (deployment.node.mode == "experts") == demanded
            assert card.memory.used <= plan.memory_bytes <= limit


@pytest.mark.parametrize(
    ("family", "limit", "options", "way_out"),
    [
        ("llama", 64 << 20, DEMAND, "this model has no experts; leave it out"),
        ("olmoe", 1 << 20, DEMAND, r"--gpu-memory \d+MiB would do"),
        ("olmoe", 64 << 20, replace(DEMAND, weights="ram"), "leave those out"),
    ],
)
def test_what_cannot_be_on_demand_is_refused_by_name(
    family: str, limit: int, options: OffloadOptions, way_out: str, tiny_pack: Packs, tmp_path: Path
) -> None:
    with closing(open_emulated(CARD, limit)) as card:
        how = AcceleratorSetup(card, at_once(), options)
        with pytest.raises(PlanError, match=way_out), beside(tiny_pack(family), tmp_path, card, how):
            pytest.fail("it was built")
        assert card.memory.used == 0

"""Keys and values whose heads are divided between accelerator and RAM: tokens are those of each request alone."""

from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.cluster.inprocess import ThreadedWorkers, in_process_deployment
from tests.support.devices.dividing import SMALL, check_sides, dividing, keep_heads
from tests.support.devices.offloading import answers, offloaded, prompts
from tests.support.devices.opencl_device import opencl_device
from tests.support.devices.schedules import WHOLE, use_schedule
from tests.support.devices.shuffled import Shuffled
from tests.support.kernels.kernel_cases import native
from tests.support.models import make_model
from tpi.devices.choose import open_device
from tpi.devices.options import OffloadOptions
from tpi.errors import PlanError
from tpi.kernels.kv import KvDtype
from tpi.net.fields import GroupBatch
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from worker.pipelines.accelerated import BatchAccelerated
from worker.pipelines.orders import Interleaved, Layerwise
from worker.pipelines.pipeline import BatchSchedule
from worker.plan.case import Candidate, Case
from worker.plan.modes.batch import BatchSettings, planned

BATCH = OffloadOptions(pipeline="batch")
HEADS, KV_HEADS = 12, 6  # of the models that are made here
LIMIT = 1 << 30  # bytes


@pytest.fixture(scope="module")
def many_heads(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pack]:
    """Return a model of three layers in which pairs of query heads share keys and values."""

    def made(family: str) -> Pack:
        source, target = tmp_path_factory.mktemp(family), tmp_path_factory.mktemp("packs") / family
        make_model(family, source, layers=3, heads=(HEADS, KV_HEADS))
        pack_model(open_source(source), "f32", target)
        return Pack.open(target)

    return made


def beside_a_slow_host(case: Case) -> Candidate[BatchSettings]:
    """Return the node's own plan; calls begin at once, and the host reads a hundredth of the accelerator's speed."""
    machine = case.machine
    assert machine is not None
    device = machine.accelerator
    assert device is not None
    quick = replace(device, rates=replace(device.rates, start=0.0), link=replace(device.link, latency=0.0))
    host = replace(machine.host, start=0.0, read=device.rates.read / 100)
    return planned(replace(case, machine=replace(machine, accelerator=quick, host=host)))


def alone(pack: Pack, cache: Path, asked: list[list[int]], length: int = 6, **more: Any) -> list[list[int]]:
    """Return the answers of each request by itself on the host."""
    with closing(in_process_deployment(pack, [1], cache / "host", **(SMALL | more))) as deployment:
        return [answers(deployment, [prompt], length)[0] for prompt in asked]


@pytest.mark.parametrize("attends_there", [False, True])
@pytest.mark.parametrize(
    ("family", "heads"), [("llama", 1), ("mixtral", 2), ("olmoe", 2), ("gptoss", 1), ("deepseek2", 4)]
)
def test_tokens_of_a_batch_are_those_of_each_request_alone(
    family: str, heads: int, attends_there: bool, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    """Also with norms over all heads, sinks, and keys and values from a latent vector."""
    pack = tiny_pack(family)
    asked = prompts(pack.config.vocab, 9, seed=4)
    expected = alone(pack, tmp_path, asked)
    decide = {0: keep_heads(heads, attends_there, 0.3)}
    with (
        closing(open_device("emu:1GiB,stretch=1")) as device,
        offloaded(pack, tmp_path / "batch", {0: device}, BATCH, decide=decide, **SMALL) as deployment,
    ):
        link = dividing(deployment)
        assert link.pipeline.schedule.host_attends != attends_there
        assert answers(deployment, asked) == expected
        check_sides(deployment.node, LIMIT)
        share = f"{heads / link._plan.kv_heads:.0%} of the keys and values"
        assert "both attend" in link.describe()
        assert share in link.describe()
        assert link.figures.kv_bytes > 0  # of the other heads: prompts are attended with there


@pytest.mark.parametrize("attends_there", [False, True])
@pytest.mark.parametrize("kv", ["f16", "q8", "q4"])
def test_formats_of_keys_and_values(
    kv: KvDtype, attends_there: bool, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    """Both sides round keys and values in the same way."""
    pack = tiny_pack("llama")
    asked = prompts(pack.config.vocab, 9, seed=7)
    expected = alone(pack, tmp_path, asked, kv=kv)
    decide = {0: keep_heads(2, attends_there)}
    with (
        closing(open_device("emu:1GiB,stretch=1")) as device,
        offloaded(pack, tmp_path / "batch", {0: device}, BATCH, decide=decide, kv=kv, **SMALL) as deployment,
    ):
        dividing(deployment)
        assert answers(deployment, asked) == expected
        check_sides(deployment.node, LIMIT)


@pytest.mark.parametrize("attends_there", [False, True])
def test_real_queues_and_events(attends_there: bool, tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    """On OpenCL, whose kernels copy heads to the host."""
    pack = tiny_pack("mixtral")
    asked = prompts(pack.config.vocab, 9, seed=2)
    expected = alone(pack, tmp_path, asked)
    with (
        opencl_device(LIMIT) as device,
        offloaded(
            pack, tmp_path / "batch", {0: device}, BATCH, decide={0: keep_heads(1, attends_there)}, **SMALL
        ) as deployment,
    ):
        dividing(deployment)
        assert answers(deployment, asked) == expected
        check_sides(deployment.node, LIMIT)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("heads", [1, 4])
def test_timing_changes_nothing(family: str, heads: int, many_heads: Callable[[str], Pack], tmp_path: Path) -> None:
    """Each case has 50 drawn timings of its copies and calls.

    In each, the host attends with the other heads, or the accelerator does, in either order. Either side adds residual
    connections, and weights are in many chunks or in one.
    """
    pack, seeds = many_heads(family), range(50)
    asked = [prompts(pack.config.vocab, 5, seed, longest=36) for seed in seeds]
    expected = [alone(pack, tmp_path, each, 3) for each in asked]
    with (
        closing(Shuffled(native, 0)) as device,
        offloaded(
            pack, tmp_path / "batch", {0: device}, BATCH, decide={0: keep_heads(heads, False)}, **SMALL
        ) as deployment,
    ):
        link = dividing(deployment)
        attends, capacity = link.pipeline.attends, link.offload.memory_bytes
        for seed, own, wanted in zip(seeds, asked, expected, strict=True):
            random = device._random = Random(seed)
            order = Interleaved(attends) if random.random() < 0.6 else Layerwise(attends)
            link.lanes.adds_there = random.random() < 0.5
            schedule = BatchSchedule(random.randint(1, 5), random.random() < 0.5, order, random.randint(1, 3))
            use_schedule(link, schedule, 4096 * random.randint(4, 32) if random.random() < 0.7 else WHOLE)
            assert answers(deployment, own, 3) == wanted, seed
            assert device.memory.used <= capacity
        check_sides(deployment.node, capacity)


def test_nodes_of_a_group_divide_each_its_own(many_heads: Callable[[str], Pack], tmp_path: Path) -> None:
    """Two nodes that share a head of keys and values keep different shares of their heads on their accelerators.

    One of them attends with the other heads on the accelerator, the other on the host. A third node has no accelerator.
    There are 50 drawn timings.
    """
    pack = many_heads("mixtral")
    asked = prompts(pack.config.vocab, 5, seed=1, longest=36)
    expected = alone(pack, tmp_path, asked, 3)
    decide = {0: keep_heads(2, False), 1: keep_heads(1, True)}
    with ExitStack() as stack:
        cards = {rank: stack.enter_context(closing(Shuffled(native, rank))) for rank in (0, 1)}
        more = SMALL | {"batch": GroupBatch(5, 3, True, 16)}
        deployment = stack.enter_context(offloaded(pack, tmp_path, cards, BATCH, (5, 4, 3), decide, **more))
        workers = deployment._workers
        assert isinstance(workers, ThreadedWorkers)
        nodes = [deployment.node, workers.nodes[0]]
        for seed in range(50):
            for rank, node in enumerate(nodes):
                random = cards[rank]._random = Random(2 * seed + rank)
                assert isinstance(node.link, BatchAccelerated)
                node.link.lanes.adds_there = random.random() < 0.5
            assert answers(deployment, asked, 3) == expected, seed
        for node in nodes:
            check_sides(node, node.link.offload.memory_bytes)  # type: ignore[union-attr]
        shares = [node.link.settings.policy.kv_kept for node in nodes]  # type: ignore[union-attr]
        assert 0 < min(shares) < max(shares) < 1


def test_what_is_planned_with_little_memory_is_kept_to(many_heads: Callable[[str], Pack], tmp_path: Path) -> None:
    """With a slow host and growing memory, plans go from all heads on one side to all heads on the other."""
    pack = many_heads("llama")
    asked = prompts(pack.config.vocab, 6, seed=2, longest=20)
    expected = alone(pack, tmp_path, asked, 3)
    kept = set[int]()
    for room in range(1 << 20, 3 << 20, 150_000):
        with (
            closing(open_device("emu:1GiB,stretch=1", room)) as device,
            suppress(PlanError),
            offloaded(
                pack, tmp_path / str(room), {0: device}, BATCH, decide={0: beside_a_slow_host}, **SMALL
            ) as deployment,
        ):
            link = dividing(deployment)
            assert answers(deployment, asked, 3) == expected
            check_sides(deployment.node, room)
            kept.add(link.settings.card_kv_heads)
    assert len(kept - {0, KV_HEADS}) > 1


def test_both_memories_hold_together_what_neither_would(many_heads: Callable[[str], Pack], tmp_path: Path) -> None:
    """`--memory` is never exceeded; some values of it are too small for keys and values on one side alone."""
    pack = many_heads("llama")
    asked = prompts(pack.config.vocab, 6, seed=2, longest=20)
    expected = alone(pack, tmp_path, asked, 3)
    held: dict[str, set[int]] = {"ram": set(), "gpu": set(), "auto": set()}
    for memory, kv in product(range(7600 << 10, 9000 << 10, 200 << 10), held):
        more: dict[str, Any] = SMALL | {"memory": memory, "scheduler": "window"}
        options = OffloadOptions("auto", kv, "batch")  # type: ignore[arg-type]
        with (
            closing(open_device("emu:1GiB,stretch=1", 1700 << 10)) as device,
            suppress(PlanError),
            offloaded(pack, tmp_path / str(memory), {0: device}, options, **more) as deployment,
        ):
            dividing(deployment)
            assert answers(deployment, asked, 3) == expected
            check_sides(deployment.node, 1700 << 10)
            assert deployment.node.budget.used <= memory
            held[kv].add(memory)
    assert held["ram"] | held["gpu"] < held["auto"]

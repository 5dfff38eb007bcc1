"""A batch in micro-batches over several nodes: every token is that of the request alone, whatever each node has."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import pytest

from master.deployment.assignments import assignments
from master.deployment.stages import one_stage
from tests.support.cluster.inprocess import ThreadedWorkers, in_process_deployment
from tests.support.devices.grouping import BATCH, CASES, SMALL, alone, grouped
from tests.support.devices.offloading import answers, offloaded, prompts
from tests.support.devices.schedules import use_schedule
from tests.support.devices.shuffled import Shuffled
from tests.support.kernels.kernel_cases import native
from tpi.devices.options import OffloadOptions
from tpi.errors import PlanError
from tpi.net.fields import GroupBatch
from tpi.net.messages import NodeOptions, PeerAddress
from tpi.pack.reader import Pack
from worker.node.node import Node
from worker.node_plan import NodePlan, node_plan
from worker.pipelines.accelerated import BatchAccelerated
from worker.pipelines.hosted import HostedPipeline
from worker.plan.choose import check

F32 = npt.NDArray[np.float32]
SEEDS = 80


@pytest.mark.parametrize(("case", "family"), [*((case, "mixtral") for case in CASES), ("three, uneven", "llama")])
def test_tokens_of_a_group_are_those_of_each_request_alone(
    case: str, family: str, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    pack = tiny_pack(family)
    asked = prompts(pack.config.vocab, 11, seed=4)
    with grouped(pack, tmp_path, CASES[case]) as (deployment, nodes):
        assert answers(deployment, asked) == alone(pack, tmp_path, asked)
        divisions = [node.loop._division for node in nodes]
        assert len({division.schedule.order for division in divisions}) == 1  # type: ignore[attr-defined]
        for rank, node in enumerate(nodes):
            assert isinstance(node.link, BatchAccelerated) == (rank in CASES[case][1])
            assert isinstance(divisions[rank], HostedPipeline) == (node.link is None)
            if isinstance(node.link, BatchAccelerated):
                room = node.link.device.memory
                assert room.limit is not None
                assert room.used <= node.link.offload.memory_bytes <= room.limit


@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [
        ("olmoe", "f32", BATCH), ("qwen2moe", "f32", BATCH), ("gemma2", "f32", OffloadOptions("ram", "ram", "batch")),
        ("opt", "f32", OffloadOptions("disk", "ram", "batch")), ("olmo2", "f32", BATCH),
        ("mixtral", "q4", OffloadOptions(kv="gpu", pipeline="batch")),
    ],
)  # fmt: skip
def test_other_families_in_a_group(
    family: str, dtype: str, options: OffloadOptions, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    """Norms over all nodes' heads, shared experts, norms after a block, weights from disk, resident keys and values."""
    pack = tiny_pack(family, dtype)
    asked = prompts(pack.config.vocab, 9, seed=3)
    shares = (1, 2, 1)
    with closing(in_process_deployment(pack, shares, tmp_path / "host", **SMALL)) as deployment:
        expected = answers(deployment, asked)
    case = shares, {0: 4, 1: 6, 2: 3}, GroupBatch(9, 3, True, 32)
    with grouped(pack, tmp_path, case, options) as (deployment, _):
        assert answers(deployment, asked) == expected


def test_timing_changes_nothing(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    """80 drawn timings of two accelerators and a host, with drawn sides for residual additions, and drawn chunks."""
    pack = tiny_pack("mixtral")
    asked = prompts(pack.config.vocab, 5, seed=1, longest=8)
    small = SMALL | {"context": 32, "pool": 12}
    with closing(in_process_deployment(pack, [1], tmp_path / "host", **small)) as deployment:
        expected = answers(deployment, asked, 2)
    with ExitStack() as stack:
        cards = {rank: stack.enter_context(closing(Shuffled(native, rank))) for rank in (0, 1)}
        together = GroupBatch(5, 5, True, 16)
        options = OffloadOptions("ram", "ram", "batch")
        deployment = stack.enter_context(offloaded(pack, tmp_path, cards, options, (2, 3, 1), batch=together, **small))
        workers = deployment._workers
        assert isinstance(workers, ThreadedWorkers)
        nodes = [deployment.node, workers.nodes[0]]
        for seed in range(SEEDS):
            for rank, node in enumerate(nodes):
                random = cards[rank]._random = Random(2 * seed + rank)
                assert isinstance(node.link, BatchAccelerated)
                node.link.lanes.adds_there = random.random() < 0.5
                use_schedule(node.link, node.link.pipeline.schedule, 4096 * random.randint(4, 32))
            assert answers(deployment, asked, 2) == expected, seed


def test_a_sum_is_kept_until_the_accelerator_has_read_it(
    tiny_pack: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a collective's result is reused by the next sum."""
    pack = tiny_pack("llama")
    asked = prompts(pack.config.vocab, 8, seed=2)
    expected = alone(pack, tmp_path, asked)
    with grouped(pack, tmp_path, CASES["two alike"]) as (deployment, nodes):
        for node in nodes:
            _reuse(node, monkeypatch)
        assert answers(deployment, asked) == expected


def _reuse(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, last = node.loop.group.finish, list[F32]()

    def reusing() -> F32 | None:
        for earlier in last:
            earlier.fill(np.nan)
        total = finish()
        last[:] = [] if total is None else [total.copy()]
        return last[0] if last else None

    monkeypatch.setattr(node.loop.group, "finish", reusing)


def test_a_host_that_reads_from_disk_is_refused(tiny_pack: Callable[..., Pack]) -> None:
    """With less and less memory, the error first names a setting that would do, then says that none does."""
    pack = tiny_pack("llama", "f32")
    stages = one_stage(pack, (1, 2))
    peers = [PeerAddress(rank, f"node {rank}", "") for rank in range(2)]
    options = NodeOptions(64, 96, "f32", 32, scheduler="window", batch=GroupBatch(12, 5, True, 8))
    plan = node_plan(assignments(pack, stages, peers, options, session=1, epoch=1)[0])
    said = [_refused(replace(plan, options=replace(options, memory=size << 10))) for size in range(7000, 11000, 50)]
    assert said[-1] == ""
    assert any("for every micro-batch of --pipeline batch; give it --memory" in each for each in said)


def _refused(plan: NodePlan) -> str:
    try:
        check(plan)
    except PlanError as error:
        return str(error)
    return ""

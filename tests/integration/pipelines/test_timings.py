"""Batches in 200 drawn timings, under every schedule: tokens are those of each request alone.

Copies end in any order, half by half.
"""

from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.dividing import keep_heads
from tests.support.devices.offloading import answers, offloaded, prompts
from tests.support.devices.schedules import SCHEDULES, WHOLE, use_schedule
from tests.support.devices.shuffled import Shuffled
from tests.support.kernels.kernel_cases import native
from tests.support.models import make_model
from tpi.devices.host import open_host
from tpi.devices.options import OffloadOptions
from tpi.kernels.spec import NO_TOKENS
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.trace import OFF
from worker.pipelines.accelerated import BatchAccelerated
from worker.pipelines.lanes import BatchLanes
from worker.pipelines.micro import QueuedMicroBatch
from worker.pipelines.orders import Layerwise
from worker.pipelines.pipeline import BatchSchedule

SEEDS = range(200)
CGOPIPE = "CGOPipe"
FOLLOWED = [CGOPIPE, *SCHEDULES]  # each in its part of the timings
STREAMED = OffloadOptions("ram", "ram", "batch")
SMALL: dict[str, Any] = {"context": 64, "pool": 24, "chunk": 32}  # tokens, pages


@pytest.fixture(scope="module")
def three_layers(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """Return a pack of three layers with experts.

    With two, each layer would have a place of its own, and stale data would be right.
    """
    source, target = tmp_path_factory.mktemp("mixtral"), tmp_path_factory.mktemp("packs") / "three"
    make_model("mixtral", source, layers=3)
    pack_model(open_source(source), "f32", target)
    return Pack.open(target)


@pytest.mark.parametrize("name", FOLLOWED)
def test_tokens_do_not_depend_on_timing(name: str, three_layers: Pack, tmp_path: Path) -> None:
    """Micro-batches of some sequences, with layers in many chunks or in one, within the planned memory.

    Residual connections are added by the accelerator or by the host. Prompts differ each time, so that stale data in a
    page is never right by chance. Schedules change while the next weights are loaded.
    """
    pack = three_layers
    seeds = SEEDS[FOLLOWED.index(name) :: len(FOLLOWED)]
    asked = [prompts(pack.config.vocab, 5, seed, longest=36) for seed in seeds]
    with closing(in_process_deployment(pack, [1], tmp_path / "host", **SMALL)) as deployment:
        expected = [[answers(deployment, [prompt], 2)[0] for prompt in each] for each in asked]
    with (
        closing(Shuffled(native, 0)) as device,
        offloaded(pack, tmp_path / "batch", {0: device}, STREAMED, **SMALL) as deployment,
    ):
        link = deployment.node.link
        assert isinstance(link, BatchAccelerated)
        planned, capacity = link.pipeline.schedule, link.offload.memory_bytes
        for seed, own, wanted in zip(seeds, asked, expected, strict=True):
            random = device._random = Random(seed)
            micro_batch = random.randint(1, 5)
            schedule = replace(planned, micro_batch=micro_batch)
            if name != CGOPIPE:
                schedule = SCHEDULES[name](link.pipeline.attends, micro_batch)
            link.lanes.adds_there = random.random() < 0.5
            use_schedule(link, schedule, 4096 * random.randint(4, 32) if random.random() < 0.7 else WHOLE)
            assert answers(deployment, own, 2) == wanted, seed
            assert device.memory.used <= capacity
        moved = link.figures
        assert min(moved.weight_bytes, moved.kv_bytes) > 0


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("host_attends", [True, False])
def test_a_failed_copy_is_named_and_its_step_can_be_repeated(
    host_attends: bool, kept: int, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    """Any copy may fail.

    If new keys and values could not be saved after their step, they are lost, and every later step says so. Keys and
    values of `kept` heads are on the accelerator.
    """
    pack = tiny_pack("llama")
    asked = prompts(pack.config.vocab, 4, seed=2)
    with closing(in_process_deployment(pack, [1], tmp_path / "host", **SMALL)) as deployment:
        expected = [answers(deployment, [prompt], 3)[0] for prompt in asked]
    outcomes = [_after_failure(pack, tmp_path, ahead, host_attends, kept, asked) for ahead in range(1, 60, 3)]
    assert outcomes.count(expected) > 6
    assert all(outcome in (expected, "lost") for outcome in outcomes)


def _after_failure(
    pack: Pack, cache: Path, ahead: int, host_attends: bool, kept: int, asked: list[list[int]]
) -> list[list[int]] | str:
    """Return the answers although the copy number `ahead` fails, or "lost" if they cannot be computed again."""
    failing: set[int] = set()
    with (
        closing(Shuffled(native, ahead, failing.__contains__)) as device,
        offloaded(
            pack, cache / "batch", {0: device}, STREAMED, decide={0: keep_heads(kept, not host_attends)}, **SMALL
        ) as deployment,
    ):
        link = deployment.node.link
        assert isinstance(link, BatchAccelerated)
        if not host_attends:
            use_schedule(link, BatchSchedule(2, False, Layerwise(link.pipeline.attends)), 1 << 16)
        failing.add(device.copies + ahead)
        for _ in range(2):
            with suppress(OSError):
                return answers(deployment, asked, 3)
        failing.clear()
        with pytest.raises(OSError, match="copy"):
            answers(deployment, asked, 3)
        return "lost"


@pytest.mark.parametrize("adds_there", [True, False])
def test_one_half_layer_does_not_use_input_of_the_other(adds_there: bool) -> None:
    """Each half of the layer norms the same input. The accelerator is late, and the side that adds is not."""
    late: list[Callable[[], object]] = []
    kernels: Any = SimpleNamespace(prepare=lambda spec, x, into: spec)
    device: Any = SimpleNamespace(kernels=kernels, start=late.append)
    x, prepared = np.zeros((1, 4), np.float32), list[object]()
    with closing(BatchLanes(device, open_host(), OFF, adds_there)) as lanes:
        batch = QueuedMicroBatch(0, x, NO_TOKENS, np.arange(1), lanes, True)

        def prepare(spec: Any) -> None:
            prepared.append(batch.prepared(spec, device, kernels))

        for half in ("attention", "neurons"):
            late.append(partial(prepare, half))
            batch.join()
    for call in late:
        call()
    assert prepared == ["attention", "neurons"]

"""The baselines of batches: other schedules, which give the same tokens, and FlexGen's linear program."""

from collections.abc import Callable
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.experts.flexgen import flexgen_policy
from scheduler.model.machine import emulated_node
from scheduler.model.offload.memory import Needs
from scheduler.model.roofline.latency import throughput
from scheduler.model.roofline.policy import BatchProblem, BatchWork
from scheduler.model.roofline.search import best_policy
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.offloading import answers, batched, offloaded, prompts, weights_bytes
from tests.support.devices.schedules import SCHEDULES, as_a_whole, follow
from tests.support.roofline import MIXTRAL
from tpi.devices.choose import open_device
from tpi.devices.emulated.machine import parse_emulated
from tpi.devices.options import OffloadOptions
from tpi.pack.reader import Pack

SMALL: dict[str, Any] = {"context": 64, "pool": 96, "chunk": 32}  # tokens, pages


@pytest.mark.parametrize(("name", "family"), list(product(SCHEDULES, ["mixtral", "llama"])))
def test_each_schedule_gives_the_tokens_of_each_request_alone(
    name: str, family: str, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    pack = tiny_pack(family)
    asked = prompts(pack.config.vocab, 11, seed=4)
    with closing(in_process_deployment(pack, [1], tmp_path / "host", **SMALL)) as deployment:
        expected = [answers(deployment, [prompt])[0] for prompt in asked]
    room = weights_bytes(pack) // 2 + (4 << 20)
    options = OffloadOptions("ram", "ram", "batch")
    with (
        closing(open_device("emu:1GiB,stretch=1", room)) as device,
        offloaded(pack, tmp_path / "batch", {0: device}, options, decide={0: as_a_whole}, **SMALL) as deployment,
    ):
        link = batched(deployment)
        follow(link, name)
        assert answers(deployment, asked) == expected
        assert device.memory.used <= link.offload.memory_bytes <= room


def test_flexgens_policy_attends_on_the_card_and_is_slower() -> None:
    """Table 5, by TPI's cost model, which counts the bytes that kernels read."""
    machine = emulated_node(parse_emulated("t4"))
    problem = BatchProblem(MIXTRAL, machine, BatchWork(504, 418, 128), Needs(400_000, 1 << 28), step=20_000)
    theirs, ours = flexgen_policy(problem), best_policy(problem).policy
    assert theirs.attention_there
    assert not ours.attention_there
    assert throughput(problem, theirs) < throughput(problem, ours)


def test_flexgens_program_has_the_best_of_its_own_grid() -> None:
    """Its choice of shares for one batch size: no others satisfy its inequalities and take less time."""
    from benchmarks.experts.flexgen import _rows, _solved

    machine = emulated_node(parse_emulated("t4"))
    problem = BatchProblem(MIXTRAL, machine, BatchWork(64, 418, 128), Needs(400_000, 1 << 28), step=20_000)
    ((value, _),) = _solved(problem, 16, 4)
    matrix, limits = (np.array(each) for each in _rows(problem, 16, 64))
    best = np.inf
    for weights, disk in product(np.linspace(0, 1, 11), repeat=2):
        if weights + disk > 1:
            continue
        shares = np.array([weights, 1 - weights - disk, disk, 0, 1, 0, 0, 0])
        left = matrix @ shares
        if (left[8:] <= limits[8:] + 1e-9).all():  # memories
            first, then = (max(left[at : at + 4] - limits[at : at + 4]) for at in (0, 4))
            best = min(best, problem.layer.layers * (first + 127 * then) / 64)
    assert value <= best * (1 + 1e-9)
    assert best < np.inf

"""The assumed speed of a node before its blocks are placed."""

from collections.abc import Callable

import numpy as np
import pytest

from master.deployment.assignments import assignments
from master.deployment.stages import one_stage
from scheduler.storage.tune import DiskSpeed
from tpi.devices.pages import page_buffer
from tpi.kernels import open_kernels
from tpi.net.messages import NodeOptions, PeerAddress
from tpi.pack.reader import Pack
from worker.node_plan import node_plan
from worker.plan.speeds import head_bytes, memory_speed, speeds_of

MIB = 1 << 20


@pytest.mark.parametrize(("dtype", "bytes_per_weight"), [("f32", 4), ("q8", 34 / 32)])
def test_the_time_between_tokens_is_the_head_and_reads_in_flight(
    tiny_pack: Callable[..., Pack], dtype: str, bytes_per_weight: float
) -> None:
    pack = tiny_pack("llama", dtype)
    one = assignments(
        pack, one_stage(pack, [1.0]), [PeerAddress(0, "node", "")], NodeOptions(64, 4, "f32",
        16), session=1, epoch=1, collective="loopback",
    )[0]  # fmt: skip
    assert head_bytes(node_plan(one)) == pytest.approx(pack.config.vocab * pack.config.hidden * bytes_per_weight)
    disk = DiskSpeed(chunk=4 * MIB, threads=4, bytes_per_second=1e9)
    found = speeds_of(node_plan(one), disk, 4 * MIB, 8 * MIB, open_kernels())
    assert found.compute > 0
    assert found.disk < disk.bytes_per_second
    assert found.turn == pytest.approx(head_bytes(node_plan(one)) / found.compute + 4 * MIB / 1e9)
    assert found.start == pytest.approx(0.5 * MIB / 1e9)
    assert sum(found.costs([100, 100]).exchange) == found.turn


@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_memory_is_read_by_either_implementation(implementation: str) -> None:
    kernels = open_kernels(implementation)
    assert 1e6 < memory_speed(MIB, kernels) < 1e13
    kernels.read(np.empty(0, np.uint8))
    kernels.read(page_buffer(10))

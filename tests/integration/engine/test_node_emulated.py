"""A node whose second device, host and disk are emulated: the same bits, in the time that the model says."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from master.generation.engine import Engine
from scheduler.storage.disk import DirectDisk
from scheduler.storage.timed import TimedDisk
from tests.support.cluster.inprocess import in_process_deployment, in_process_engine
from tpi.devices.emulated.device import EmulatedDevice, open_emulated
from tpi.devices.host import open_host
from tpi.errors import DeviceFullError
from tpi.pack.reader import Pack
from worker.node.order import Order, phase_by_phase, plain

TOKENS = [3 + 7 * at % 200 for at in range(40)]
HALF = 0.5


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with closing(open_emulated("64MiB,link=1GB/s,memory=20GB/s,flops=100GFLOPS,host=0.5")) as emulated:
        yield emulated


@pytest.mark.parametrize("order", [plain, phase_by_phase])
def test_half_on_an_emulated_device_is_bit_for_bit_two_nodes(
    order: Order, device: EmulatedDevice, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    pack, emulation = tiny_pack("llama"), device.emulation
    with in_process_engine(pack, [1, 1], tmp_path / "two") as engine:
        expected = engine.logits(TOKENS)
    host, disk = emulation.host(open_host()), TimedDisk(DirectDisk(), emulation.disk)
    with closing(
        in_process_deployment(pack, [1], tmp_path / "one", others=[(device, HALF)], order=order, host=host, disk=disk)
    ) as deployment:
        engine = Engine(deployment)
        np.testing.assert_array_equal(engine.logits(TOKENS), expected)
        assert emulation.calibrate() > 1
        before = [lane.tasks for lane in emulation.lanes]
        np.testing.assert_array_equal(engine.logits(TOKENS), expected)
        after = [lane.tasks for lane in emulation.lanes]
        assert [late > early for early, late in zip(before, after, strict=True)] == [True, True, *[False] * 4]
        assert emulation.disk.lane.tasks > 0
        assert emulation.up.lane.tasks > 0
    assert device.memory.used == 0


def test_an_emulated_device_that_is_too_small_is_named(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    with closing(open_emulated("64KiB")) as small:
        with pytest.raises(DeviceFullError, match="emu may use 65536 bytes"):
            in_process_deployment(tiny_pack("llama"), [1], tmp_path, others=[(small, HALF)])
        assert small.memory.used == 0

"""The emulated accelerator computes as the kernels beneath it do, on its own memory only, and ends its threads."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from scheduler.storage.timed import TimedDisk
from tests.support.devices.virtual_time import VirtualTime
from tests.support.disks import MemoryDisk
from tests.support.kernels.kernel_cases import attention_case, ffn_case, native
from tpi.devices.base import Device
from tpi.devices.emulated.device import EmulatedDevice, open_emulated
from tpi.devices.emulated.emulation import Emulation
from tpi.devices.emulated.machine import parse_emulated
from tpi.devices.pages import PAGE, Bytes
from tpi.errors import DeviceError, DeviceFullError, KernelError
from tpi.kernels.spec import KvArray


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    time = VirtualTime()
    emulated = EmulatedDevice(Emulation(parse_emulated("1MiB"), real=time.real, sleep=time.sleep), native)
    yield emulated
    emulated.close()


def held(device: Device, data: Bytes) -> Bytes:
    there = device.memory.allocate(data.size)
    device.copy(data, there).wait()
    return there


def pages(device: Device, like: KvArray) -> KvArray:
    return held(device, like.reshape(-1).view(np.uint8)).view(like.dtype).reshape(like.shape)


@pytest.mark.parametrize("tokens", [1, 20])
def test_neurons_are_the_native_ones(device: EmulatedDevice, tokens: int) -> None:
    case = ffn_case(np.random.default_rng(1), format="q4", tokens=tokens)
    data = held(device, case.data)
    prepared = device.kernels.prepare(case.spec, native.prepare(case.spec, case.x))
    beside = device.start(lambda: device.kernels.ffn(case.spec, data, prepared))
    np.testing.assert_array_equal(beside.wait(), native.ffn(case.spec, case.data, case.x))
    again = device.kernels.prepare(case.spec, case.x, into=prepared)
    np.testing.assert_array_equal(device.kernels.ffn(case.spec, data, again), beside.wait())
    with pytest.raises(DeviceError, match="weights must lie in the memory of emu"):
        device.start(lambda: device.kernels.ffn(case.spec, case.data, prepared)).wait()
    with pytest.raises(KernelError, match="other kernels"):
        device.kernels.ffn(case.spec, data, native.prepare(case.spec, case.x))


def test_attention_is_the_native_one_whole_and_in_phases(device: EmulatedDevice) -> None:
    case = attention_case(np.random.default_rng(2), format="q8", lengths=((33, 4), (0, 3)))
    spec, data = case.spec, held(device, case.data)
    keys, values = pages(device, case.kv.keys[0]), pages(device, case.kv.values[0])
    expected = native.attention(spec, case.data, case.x, case.kv.keys[0], case.kv.values[0], case.batch)
    kernels = device.kernels
    np.testing.assert_array_equal(kernels.attention(spec, data, case.x, keys, values, case.batch), expected)
    np.testing.assert_array_equal(keys, case.kv.keys[0])
    projected = kernels.project(spec, data, case.x, case.batch.positions)
    mixed = kernels.attend(spec, projected, keys, values, case.batch)
    np.testing.assert_array_equal(kernels.output(spec, data, mixed), expected)
    with pytest.raises(DeviceError, match="the caches must lie in the memory of emu"):
        kernels.attend(spec, projected, case.kv.keys[0], values, case.batch)


def test_phases_take_the_time_of_the_whole_but_for_launches(device: EmulatedDevice) -> None:
    case = attention_case(np.random.default_rng(3), lengths=((3, 2),))
    lane, launch = device.emulation.compute, device.emulation.machine.launch
    data, keys, values = held(device, case.data), pages(device, case.kv.keys[0]), pages(device, case.kv.values[0])
    device.kernels.attention(case.spec, data, case.x, keys, values, case.batch)
    whole = lane.busy
    projected = device.kernels.project(case.spec, data, case.x, case.batch.positions)
    mixed = device.kernels.attend(case.spec, projected, keys, values, case.batch)
    device.kernels.output(case.spec, data, mixed)
    assert lane.busy - whole == pytest.approx(whole + 2 * launch)


def test_memory_is_refused_beyond_the_capacity_and_elsewhere(device: EmulatedDevice) -> None:
    with pytest.raises(DeviceFullError, match=f"emu may use {1 << 20} bytes"):
        device.memory.allocate((1 << 20) + 1)
    here = device.staging(PAGE)
    with pytest.raises(DeviceError, match="one end of a copy must lie in the memory of emu"):
        device.copy(here, here.copy())
    with pytest.raises(DeviceError, match="arrays of one size"):
        device.copy(here, device.memory.allocate(2 * PAGE))


def test_threads_end_when_it_is_closed() -> None:
    device = open_emulated("1MiB,link=1GB/s,name=ending")
    done = device.copy(device.staging(PAGE), device.memory.allocate(PAGE))
    computed = device.start(lambda: 5)
    assert [each for each in threading.enumerate() if each.name.startswith("ending")]
    device.close()
    device.close()
    assert done.done
    assert computed.wait() == 5
    assert not [each for each in threading.enumerate() if each.name.startswith("ending")]
    with pytest.raises(RuntimeError):
        device.start(lambda: 5)


def test_a_disk_reads_at_the_emulated_speed() -> None:
    time = VirtualTime()
    emulated = Emulation(parse_emulated(f"1MiB,disk={PAGE}B/s,stretch=2"), real=time.real, sleep=time.sleep)
    content = np.arange(4 * PAGE, dtype=np.uint32).astype(np.uint8)
    path = Path("block.shard")
    disk = TimedDisk(MemoryDisk({path: content.tobytes()}, 2 * PAGE, 3), emulated.disk)
    assert (disk.chunk, disk.threads) == (2 * PAGE, 3)
    into = np.zeros(2 * PAGE, np.uint8)
    assert disk.read(path, 2 * PAGE, into) == 2 * PAGE
    np.testing.assert_array_equal(into, content[2 * PAGE :])
    assert time.real() == 4
    assert disk.read(path, 3 * PAGE, into) == PAGE  # what is beyond the end takes time as well
    assert time.real() == 8
    with pytest.raises(FileNotFoundError):
        disk.read(Path("gone"), 0, into)

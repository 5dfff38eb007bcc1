"""This machine, measured through a device's own calls on a clock that only the device advances, and remembered."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from scheduler.model.machine import LAPTOP, DiskRate, laptop_gpu
from scheduler.storage import tune
from scheduler.storage.tune import DiskSpeed
from tests.support.kernels.kernel_cases import reference
from tpi.devices.arena import Arena
from tpi.devices.base import Event, Finished, Pending
from tpi.devices.host import HostDevice
from tpi.devices.pages import Bytes, page_buffer
from tpi.kernels import Kernels
from tpi.kernels.kv import KV_DTYPES
from tpi.kernels.spec import Batch, ChainBlock
from tpi.net.fields import MachineSpeed
from worker.equipment import measured
from worker.measure import machine, remembered, speed
from worker.measure.attention import AttentionSample, Heads
from worker.measure.machine import link_of, measure_device, measure_host, sample_block
from worker.measure.remembered import contradicts, device_rates, doubt_machine, host_rates
from worker.plan.speeds import OF_DISK
from worker.service.options import WorkerOptions

T = TypeVar("T")
MIB = 1 << 20
UP, DOWN, LATENCY = 2e9, 1e9, 1e-4  # bytes per second, seconds
READ, OPERATIONS, START, FOLLOW = 5e10, 4e12, 2e-4, 1e-5
ATTENDED = {512: 4e10, 256: 3e10, 136: 2e10, 80: 1e10}  # bytes per second, by those of a vector: f32, f16, q8, q4


@dataclass
class FakeClock:
    """A clock that advances when a device says how long something took."""

    now: float = 0.0
    odd: bool = False  # copies of less than 4 MiB seem to be faster by far

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClock]:
    fake = FakeClock(100.0)
    with monkeypatch.context() as patched:
        patched.setattr(machine, "_wall_clock", fake)
        patched.setattr(machine, "_processor_time", fake)
        yield fake


@dataclass
class SlowDevice:
    """A `tpi.devices.base.Device` that takes the time of a roofline and a link, and computes nothing."""

    clock: FakeClock
    name: str = "card"
    memory: Arena = field(default_factory=lambda: Arena("card", 256 * MIB))
    kernels: Kernels = reference
    most: int = 0  # bytes of its memory in use at once, at most

    def copy(self, source: Bytes, target: Bytes) -> Event:
        self.most = max(self.most, self.memory.used)
        rate = UP if self.memory.owns(target) else DOWN
        rate *= 50 if self.clock.odd and source.size < 4 * MIB else 1
        self.clock.now += LATENCY + source.size / rate
        return Finished(lambda: None)

    def start(self, call: Callable[[], T]) -> Pending[T]:
        return Finished(call)

    def staging(self, size: int) -> Bytes:
        return page_buffer(size)

    def close(self) -> None:
        pass


class SlowKernels:
    """Kernels that compute nothing."""

    def __init__(self, clock: FakeClock, threads: int = 1) -> None:
        self._clock, self._threads = clock, threads

    def ffn(self, spec: object, data: Bytes, x: np.ndarray) -> np.ndarray:
        run = spec.neuron  # type: ignore[attr-defined]
        operations = 2 * len(x) * run.units * run.width * run.hidden * len(run.parts)
        self._clock.now += START + max(data.size / READ, operations / OPERATIONS)
        return x

    def attend(self, spec: object, projected: object, keys: np.ndarray, values: np.ndarray, batch: Batch) -> None:
        vector = keys[0, 0, 0].nbytes
        self._clock.now += START + 2 * int((batch.positions + 1).sum()) * keys.shape[1] * vector / ATTENDED[vector]

    def open_chain(self, blocks: Sequence[ChainBlock]) -> "SlowChain":
        return SlowChain(self, self._clock, blocks)

    def read(self, data: Bytes) -> None:
        self._clock.now += data.size / READ

    def isa(self) -> str:
        return "none"

    def threads(self) -> int:
        return self._threads

    def set_threads(self, count: int) -> None:
        self._threads = count


class SlowChain:
    """Takes the time of its blocks, `START` seconds once, and `FOLLOW` for each block after the first."""

    def __init__(self, kernels: SlowKernels, clock: FakeClock, blocks: Sequence[ChainBlock]) -> None:
        self._kernels, self._clock, self._blocks = kernels, clock, blocks

    def run(self, x: np.ndarray, batch: Batch) -> np.ndarray:
        for block in self._blocks:
            self._kernels.ffn(block.spec, block.data, x)
        self._clock.now += (len(self._blocks) - 1) * (FOLLOW - START)
        return x


def slow_device(clock: FakeClock, room: int = 256) -> SlowDevice:
    """Return a device with a number of MiB of memory."""
    return SlowDevice(clock, memory=Arena("card", room * MIB), kernels=SlowKernels(clock))  # type: ignore[arg-type]


def test_a_device_has_the_rates_that_its_calls_show(clock: FakeClock) -> None:
    device = slow_device(clock)
    found = measure_device(device, 64 * MIB)
    assert found.memory == 256 * MIB
    assert found.link.up == pytest.approx(UP)
    assert found.link.down == pytest.approx(DOWN)
    assert found.link.latency == pytest.approx(LATENCY)
    assert found.rates.read == pytest.approx(READ)
    assert found.rates.operations == pytest.approx(OPERATIONS, rel=0.01)
    assert found.rates.start == pytest.approx(START, rel=0.01)
    assert found.follow == pytest.approx(FOLLOW)
    assert device.memory.used == 0


@pytest.mark.parametrize("room", [4, 16, 64])
def test_a_small_device_is_measured_within_what_it_has(clock: FakeClock, room: int, tmp_path: Path) -> None:
    """The measurement takes at most a quarter of the memory, also if kernels take three times the sample."""
    device = slow_device(clock, room)
    found = device_rates(device, tmp_path).figures
    assert found.memory == room * MIB
    assert found.link.up == pytest.approx(UP)
    assert device.memory.used == 0
    assert 0 < device.most <= room * MIB // 4


def test_a_device_too_small_is_neither_measured_nor_remembered(
    clock: FakeClock, counted: list[int], tmp_path: Path
) -> None:
    """A plan with so little memory is refused later."""
    found = device_rates(slow_device(clock, 1), tmp_path)
    assert found.figures.memory == MIB
    assert found.figures.rates == laptop_gpu().rates
    assert not counted
    assert device_rates(slow_device(clock), tmp_path).figures.link.up == pytest.approx(UP)


@pytest.mark.parametrize("first", [4, 60, 256])
def test_figures_do_not_depend_on_the_limit_that_came_first(
    clock: FakeClock, counted: list[int], first: int, tmp_path: Path
) -> None:
    """Small samples give smaller figures here, as latencies and caches cause on real devices."""
    clock.odd = True
    device_rates(slow_device(clock, first), tmp_path)
    large = device_rates(slow_device(clock), tmp_path).figures
    assert large.link.up == pytest.approx(UP, rel=0.1)
    measured = len(counted)
    small = device_rates(slow_device(clock, 4), tmp_path).figures
    assert replace(small, memory=large.memory) == large  # the larger samples serve all
    assert len(counted) == measured == (1 if first == 256 else 2)


def test_an_old_measurement_does_not_return_after_a_new_one(
    clock: FakeClock, counted: list[int], tmp_path: Path
) -> None:
    device_rates(slow_device(clock), tmp_path)
    again = device_rates(slow_device(clock, 4), tmp_path, remeasure=True).figures
    measured = len(counted)
    assert device_rates(slow_device(clock, 4), tmp_path).figures == again
    assert len(counted) == measured == 2


def test_pieces_are_as_small_as_is_nearly_as_fast() -> None:
    sizes = [1 << power for power in range(16, 27, 2)]
    seconds = [1e-3 + size / 1e9 for size in sizes]
    found = link_of(sizes, seconds, seconds)
    assert found.piece == 1 << 24  # 4 MiB take 4.2 + 1 ms, 16 MiB 16.8 + 1
    quick = [1e-6 + size / 1e9 for size in sizes]
    assert link_of(sizes, quick, quick).piece == 1 << 16


def test_equal_times_give_a_rate_all_the_same() -> None:
    found = link_of([100, 200], [1.0, 1.0], [2.0, 1.0])
    assert (found.up, found.down) == (200.0, 200.0)
    assert found.latency == pytest.approx(0.5)


def test_the_sample_is_numbers() -> None:
    spec, data = sample_block(2)
    x = np.ones((3, spec.hidden), np.float32)
    assert np.isfinite(reference.ffn(spec, data, x)).all()


def test_the_host_is_measured_with_its_kernels(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure_host(SlowKernels(clock))  # type: ignore[arg-type]
    assert found.read == pytest.approx(0.85 * READ, rel=0.2)  # a call takes a while beside reading
    assert found.operations < OPERATIONS
    assert found.kv is not None
    for kv_dtype, rate in zip(KV_DTYPES, ATTENDED.values(), strict=True):
        assert 0.5 * rate < getattr(found.kv, kv_dtype) < rate  # a call takes a while here too


def test_a_clock_that_counts_other_threads_late_is_read_over_many_calls(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Systems may add the time of threads that run now only every few milliseconds, many calls at once."""
    exact = measure_host(SlowKernels(clock, 16))  # type: ignore[arg-type]
    monkeypatch.setattr(machine, "_processor_time", lambda: clock.now - clock.now % (16 * 0.004))
    found = measure_host(SlowKernels(clock, 16))  # type: ignore[arg-type]
    assert found.read == pytest.approx(exact.read, rel=0.25)
    assert found.operations == pytest.approx(exact.operations, rel=0.25)


@pytest.mark.parametrize(("quota", "threads", "cores"), [(0.1, 2, 0.1), (0.1, 1, 0.1), (1.5, 4, 1.5), (4.0, 2, 2.0)])
def test_a_quota_of_processor_time_counts_once(
    quota: float, threads: int, cores: float, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The quota counts whether or not it slowed the measurement, because the time that threads got is measured."""
    kernels = SlowKernels(clock, threads)
    monkeypatch.setattr(machine, "_wall_clock", lambda: clock.now / quota)  # by a clock on the wall it is felt
    monkeypatch.setattr(speed, "allowed_cores", lambda: quota)
    found = speed.host_rates_allowed(kernels, tmp_path).figures  # type: ignore[arg-type]
    alone = measure_host(SlowKernels(clock))  # type: ignore[arg-type]
    assert found.read == pytest.approx(cores * alone.read)
    assert found.operations == pytest.approx(cores * alone.operations)
    assert found.kv is not None
    assert alone.kv is not None
    assert found.kv.q8 == pytest.approx(cores * alone.kv.q8)
    assert kernels.threads() == threads


@pytest.fixture
def counted(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the measurements of a device."""
    calls: list[int] = []

    def measure(device: SlowDevice, sample: int) -> object:
        calls.append(1)
        return measure_device(device, sample)

    monkeypatch.setattr(remembered, "measure_device", measure)
    return calls


def test_it_is_measured_once(clock: FakeClock, counted: list[int], tmp_path: Path) -> None:
    cache = tmp_path / "new"
    first, second = (device_rates(slow_device(clock), cache) for _ in range(2))
    assert first == second
    assert len(counted) == 1
    assert first.on.startswith("card under ")
    assert 0 <= time.time() - first.at < 100
    assert device_rates(slow_device(clock), cache, remeasure=True).figures.rates == first.figures.rates
    assert len(counted) == 2


class Named(SlowDevice):
    """A card with a name."""

    identity: str = ""


def named_card(clock: FakeClock, name: str, identity: str) -> Named:
    device = Named(clock, name, Arena("card", 256 * MIB), SlowKernels(clock))  # type: ignore[arg-type]
    device.identity = identity
    return device


def test_figures_go_with_the_card_and_not_with_its_number(clock: FakeClock, counted: list[int], tmp_path: Path) -> None:
    first = device_rates(named_card(clock, "cuda:0", "RTX 3060, GPU-1, driver 5"), tmp_path).figures
    moved = device_rates(named_card(clock, "cuda:1", "RTX 3060, GPU-1, driver 5"), tmp_path).figures
    assert len(counted) == 1
    assert moved == replace(first, name="cuda:1")
    for number, other in enumerate(["RTX 3060, GPU-2, driver 5", "RTX 3060, GPU-1, driver 6", "RTX 4090, GPU-3"], 2):
        device_rates(named_card(clock, "cuda:0", other), tmp_path)
        assert len(counted) == number


def test_the_memory_that_is_free_is_looked_at_every_time(clock: FakeClock, counted: list[int], tmp_path: Path) -> None:
    device_rates(slow_device(clock), tmp_path)
    device = slow_device(clock)
    device.memory.allocate(100 * MIB)
    assert device_rates(device, tmp_path).figures.memory == 156 * MIB  # less than what it was measured with
    assert len(counted) == 1


@pytest.mark.parametrize("age", [31 * 24 * 3600.0, -1000.0])
def test_what_is_old_or_of_a_time_to_come_is_measured_again(
    clock: FakeClock, counted: list[int], tmp_path: Path, age: float
) -> None:
    device_rates(slow_device(clock), tmp_path)
    known = json.loads((tmp_path / "machine.json").read_text())
    for fields in known.values():
        fields["at"] = time.time() - age
    (tmp_path / "machine.json").write_text(json.dumps(known))
    assert time.time() - device_rates(slow_device(clock), tmp_path).at < 100
    assert len(counted) == 2


def test_what_a_run_contradicts_is_measured_again(clock: FakeClock, counted: list[int], tmp_path: Path) -> None:
    device_rates(slow_device(clock), tmp_path)
    doubt_machine(tmp_path)
    device_rates(slow_device(clock), tmp_path)
    device_rates(slow_device(clock), tmp_path)
    assert len(counted) == 2
    assert contradicts(1.0, 2.1)
    assert contradicts(1.0, 0.4)
    assert not contradicts(1.0, 1.9)
    assert not contradicts(1.0, 0.0)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 1}', '{"x": {"figures": 3}}', "\x00"])
def test_a_record_that_is_damaged_is_no_record(clock: FakeClock, counted: list[int], tmp_path: Path, text: str) -> None:
    device_rates(slow_device(clock), tmp_path)
    key = next(iter(json.loads((tmp_path / "machine.json").read_text())))
    (tmp_path / "machine.json").write_text(text.replace('"x"', json.dumps(key)))
    device_rates(slow_device(clock), tmp_path)
    assert len(counted) == 2


def test_figures_that_cannot_be_are_measured_again(clock: FakeClock, counted: list[int], tmp_path: Path) -> None:
    device_rates(slow_device(clock), tmp_path)
    known = json.loads((tmp_path / "machine.json").read_text())
    for fields in known.values():
        fields["figures"]["link"]["up"] = 0
    (tmp_path / "machine.json").write_text(json.dumps(known))
    assert device_rates(slow_device(clock), tmp_path).figures.link.up == pytest.approx(UP)


def test_a_cache_that_cannot_be_written_costs_a_measurement(
    clock: FakeClock, counted: list[int], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for _ in range(2):
        device_rates(slow_device(clock), file / "below")
    assert len(counted) == 2


def test_the_host_is_remembered_beside_devices(clock: FakeClock, counted: list[int], tmp_path: Path) -> None:
    device_rates(slow_device(clock), tmp_path)
    kernels = SlowKernels(clock)
    first, second = (host_rates(kernels, tmp_path) for _ in range(2))  # type: ignore[arg-type]
    assert first == second
    assert "1 threads, none" in first.on
    device_rates(slow_device(clock), tmp_path)
    assert len(counted) == 1


@pytest.mark.parametrize("kv", [None, {}, {"f32": 1, "f16": 1, "q8": 0, "q4": 1}])
def test_a_record_without_the_rate_of_attention_is_made_again(clock: FakeClock, tmp_path: Path, kv: object) -> None:
    kernels = SlowKernels(clock)
    first = host_rates(kernels, tmp_path)  # type: ignore[arg-type]
    known = json.loads((tmp_path / "machine.json").read_text())
    for fields in known.values():
        fields["figures"]["kv"] = kv
    (tmp_path / "machine.json").write_text(json.dumps(known))
    assert host_rates(kernels, tmp_path).figures.kv == first.figures.kv  # type: ignore[arg-type]


def test_what_is_attended_to_for_a_measurement_lies_in_caches() -> None:
    """Sequences share all pages but the last, to which each one's new token is appended."""
    sample = AttentionSample.of(Heads(4, 2, 32), "q8", 3, 100, cached=True)
    tables = sample.batch.tables
    assert tables.tolist() == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 5]]
    assert sample.nbytes == 2 * 3 * 100 * 2 * (32 + 2)
    alone = AttentionSample.of(Heads(4, 2, 32), "q8", 3, 100)
    assert len(set(alone.batch.tables.reshape(-1).tolist())) == 12
    np.testing.assert_allclose(sample.run(reference), alone.run(reference), rtol=1e-6)


def test_a_run_plans_with_the_disk_that_was_measured(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`tpi plan` and runs use the same measurement. Without files to measure with, the disk counts as a laptop's."""
    device, host = slow_device(clock), HostDevice(SlowKernels(clock))  # type: ignore[arg-type]
    assert measured(host, [device], tmp_path).machine.disk == LAPTOP.disk
    monkeypatch.setattr(speed, "disk_for", lambda files, cache: DiskSpeed(bytes_per_second=1e9 + len(files)))
    (tmp_path / "packs" / "model").mkdir(parents=True)
    (tmp_path / "packs" / "model" / "one.safetensors").write_bytes(b"weights")
    assert measured(host, [device], tmp_path).machine.disk == DiskRate(OF_DISK * (1e9 + 1))


@pytest.mark.parametrize("record", ["own", "user"])
def test_a_worker_tells_the_speed_of_its_disk_once_it_is_measured(
    record: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Runs store the speed in the user's cache, also if the worker has another cache."""
    monkeypatch.setenv("TPI_CACHE", str(tmp_path / "user"))
    (tmp_path / "own").mkdir()
    options = WorkerOptions("127.0.0.1", 0, "lap", tmp_path / "own" / "shards", speed=MachineSpeed(1e10, 1e11, 0.0))
    assert options.profile().speed == MachineSpeed(1e10, 1e11, 0.0)
    shard = tmp_path / "big.shard"
    shard.write_bytes(bytes(33 << 20))
    monkeypatch.setattr("scheduler.storage.tune.measure_disk", lambda extents: DiskSpeed(1 << 20, 2, 1e8))
    tune.disk_for([shard], tmp_path / record)
    assert options.profile().speed == MachineSpeed(1e10, 1e11, OF_DISK * 1e8)

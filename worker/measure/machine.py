"""How fast this machine is: rates of the host and of a device, and the link between them.

A device is measured through `tpi.devices.base.Device` alone: copies of several sizes in both directions, and the
product of a sample block, for one token and for many. Disks are `scheduler.storage.tune`'s.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from scheduler.model.machine import GOOD_ENOUGH, PIECES, Accelerator, DeviceLink, KvRates, Rates
from tpi.devices.base import Device
from tpi.devices.pages import Bytes, page_buffer
from tpi.kernels import Kernels
from tpi.kernels.spec import F32, FfnSpec, NormSpec
from tpi.kv import KV_DTYPES, KvDtype
from tpi.pack.layout import Part, RunLayout
from tpi.partition import FFN_UNIT
from worker.measure.attention import MIXTRAL, AttentionSample
from worker.plan.speeds import OF_MEMORY

SAMPLES = PIECES[2:]  # bytes that a device may be measured with
_BESIDE = 4  # times a sample: what must be free
_ROUNDS = 3  # of which the fastest counts
_USUAL = 7  # of which the middle one counts
_MEMORY = 64 << 20  # bytes that are more than caches keep
_HIDDEN = 1024
_UNITS = 512  # of neurons of the largest sample: 50 million weights, more bytes than caches keep
_LEAST_UNITS = 8
_TOKENS = 128  # of a sample prompt
_SEQUENCES, _CONTEXT = 8, 512  # that attend to keys and values in caches
_now = time.perf_counter
_given = time.process_time  # to all threads together


def measure_host(kernels: Kernels) -> Rates:
    """How fast these kernels multiply a sample block with one token, and with many, and attend to keys and values in
    every format; takes two tenths of a second.

    What counts is the time that the threads were given. A quota of processor time would be felt by a measurement, or
    not, as its period is; so would what else the machine computes.
    """

    def given() -> float:
        return _given() / kernels.threads()

    one, weights = sample_block(2 * _UNITS)
    read = OF_MEMORY * weights.size / _usual(partial(kernels.ffn, one, weights, _tokens(1)), given)
    spec, data = sample_block(_LEAST_UNITS * 4)
    operations = _operations(spec) / _fastest(partial(kernels.ffn, spec, data, _tokens(_TOKENS)), given)
    return Rates(read, operations, kv=KvRates(**{kv: _attending(kernels, kv, given) for kv in KV_DTYPES}))


def _attending(kernels: Kernels, kv_dtype: KvDtype, given: Callable[[], float]) -> float:
    """Bytes of keys and values in caches that attention goes over per second."""
    sample = AttentionSample.of(MIXTRAL, kv_dtype, _SEQUENCES, _CONTEXT, cached=True)
    return sample.nbytes / _fastest(partial(sample.run, kernels), given)


def free_memory(device: Device) -> int:
    """Bytes of a device's memory that are left now; plenty where it has no limit."""
    limit = device.memory.limit
    return (_MEMORY << 3) if limit is None else max(0, limit - device.memory.used)


def samples_in(room: int) -> list[int]:
    """Bytes of the samples that may be measured with in `room` bytes, the largest first: what computes with one takes
    up to three times as much beside it."""
    return [size for size in reversed(SAMPLES) if _BESIDE * size <= room]


def measure_device(device: Device, sample: int) -> Accelerator:
    """How fast a device computes, and copies from the host's memory and to it, with the memory that it has now.

    The samples take `sample` bytes at most (of `SAMPLES`: small ones say less of what large ones take), and are given
    back.

    Raises:
        DeviceError: if it cannot copy or compute.
    """
    room = free_memory(device)
    link = measure_link(device, sample)
    return Accelerator(_computing(device, sample), room, link, device.name)


def measure_link(device: Device, room: int) -> DeviceLink:
    """Rates from the largest copy, latency from the smallest, and the smallest pieces that are about as fast."""
    sizes = [size for size in PIECES if size <= room] or [PIECES[0]]
    here, there = device.staging(sizes[-1]), device.memory.allocate(sizes[-1])
    try:
        up = [_copying(device, here[:size], there[:size]) for size in sizes]
        down = [_copying(device, there[:size], here[:size]) for size in sizes]
    finally:
        device.memory.free(there)
    return link_of(sizes, up, down)


def link_of(sizes: Sequence[int], up: Sequence[float], down: Sequence[float]) -> DeviceLink:
    """The link on which copies of so many bytes took so many seconds, in each direction."""
    rates = [_slope(sizes, seconds) for seconds in (up, down)]
    latency = max(0.0, min(up[0] - sizes[0] / rates[0], down[0] - sizes[0] / rates[1]))
    speeds = [size / seconds for size, seconds in zip(sizes, up, strict=True)]
    piece = next(size for size, speed in zip(sizes, speeds, strict=True) if speed >= GOOD_ENOUGH * max(speeds))
    return DeviceLink(rates[0], rates[1], latency, piece)


def sample_block(units: int) -> tuple[FfnSpec, Bytes]:
    """An FFN block of `units` times 32 neurons in q4, and bytes for it that are numbers, in memory that was touched."""
    parts = (Part("gate", "q4", "row"), Part("up", "q4", "row"), Part("down", "q4", "column"))
    run = RunLayout("neuron", "tiled", parts, FFN_UNIT, _HIDDEN, units)
    data = page_buffer(run.units * run.unit_bytes)
    data.fill(1)
    norm = NormSpec("rms", 1e-5, np.ones(_HIDDEN, np.float32))
    return FfnSpec(run, "silu", True, norm, None, None), data[: run.units * run.unit_bytes]


def _computing(device: Device, room: int) -> Rates:
    """From the product of a sample that is as large as `room` bytes allow: of one token, and of many."""
    unit = sample_block(1)[1].size
    units = int(np.clip(room // unit, _LEAST_UNITS, _UNITS))
    large, small = sample_block(units), sample_block(_LEAST_UNITS)
    memory = device.memory.allocate(large[1].size)
    try:
        device.copy(large[1], memory).wait()
        one = _started(device, large[0], memory, 1)
        least = _started(device, small[0], memory[: small[1].size], 1)
        many = _started(device, large[0], memory, _TOKENS)
    finally:
        device.memory.free(memory)
    read = (
        max(large[1].size - small[1].size, 1) / max(one - least, 1e-9) if units > _LEAST_UNITS else large[1].size / one
    )
    start = max(0.0, least - small[1].size / read)
    return Rates(read, _operations(large[0]) / max(many - start, 1e-9), start)


def _copying(device: Device, source: Bytes, target: Bytes) -> float:
    return _fastest(lambda: device.copy(source, target).wait())


def _started(device: Device, spec: FfnSpec, data: Bytes, tokens: int) -> float:
    x = _tokens(tokens)
    return _fastest(lambda: device.start(lambda: device.kernels.ffn(spec, data, x)).wait())


def _tokens(count: int) -> F32:
    return np.ones((count, _HIDDEN), np.float32)


def _operations(spec: FfnSpec) -> float:
    """Of a sample prompt: each weight is multiplied and added once per token."""
    run = spec.neuron
    return 2.0 * _TOKENS * run.units * run.width * run.hidden * len(run.parts)


def _slope(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Bytes per second between the smallest copy and the largest; of the largest, if nothing else can be told."""
    more, longer = sizes[-1] - sizes[0], seconds[-1] - seconds[0]
    return more / longer if more and longer > 0 else sizes[-1] / max(seconds[-1], 1e-9)


def _fastest(call: Callable[[], object], clock: Callable[[], float] | None = None) -> float:
    """Seconds of the fastest of a few calls, after one that is not counted."""
    call()
    return min(_seconds(call, clock or _now) for _ in range(_ROUNDS))


def _usual(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds of the middle one of some calls, after one that is not counted: others use the memory, too."""
    call()
    return sorted(_seconds(call, clock) for _ in range(_USUAL))[_USUAL // 2]


def _seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    begun = clock()
    call()
    return max(clock() - begun, 1e-9)

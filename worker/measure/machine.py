"""Measurement of the rates of the host, of a device, and of the link between them.

A device is measured through the interface `tpi.devices.base.Device`: copies of several sizes in both directions, and
the computation of a sample block for one token and for many. `scheduler.storage.tune` measures disks.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from scheduler.model.machine import GOOD_ENOUGH, PIECES, Accelerator, DeviceLink, KvRates, Rates
from tpi.devices.base import Device
from tpi.devices.pages import Bytes, page_buffer
from tpi.kernels import Kernels
from tpi.kernels.chain import PlainChain
from tpi.kernels.kv import KV_DTYPES, KvDtype
from tpi.kernels.spec import F32, PAGE_TOKENS, Batch, ChainBlock, FfnSpec, NormSpec, Residual
from tpi.pack.layout import Part, RunLayout
from tpi.partition import FFN_UNIT
from worker.measure.attention import MIXTRAL, AttentionSample
from worker.plan.speeds import OF_MEMORY

SAMPLES = PIECES[2:]  # sizes in bytes of the samples that a device may be measured with
_ROOM_FACTOR = 4  # free memory that a measurement requires, as a multiple of the sample
_ROUNDS = 3  # calls of which the fastest counts
_SPAN = 0.02  # least processor time of each thread in a measurement, in seconds
_MOST_CALLS = 2000  # of a measurement, if the system's clock of processor time does not advance
_MEMORY = 64 << 20  # bytes to read for the rate of the host's memory; more than the processor's caches hold
_HIDDEN = 1024
_UNITS = 512  # units of 32 neurons in the largest sample: 50 million weights, more bytes than the caches hold
_LEAST_UNITS = 8
_TOKENS = 128  # of a sample prompt
_CHAINED = 4  # the longer of two sample chains has all blocks of the shorter one this many times more
_SEQUENCES, _CONTEXT = 8, 512  # of the sample of attention, whose keys and values fit into the caches
_wall_clock = time.perf_counter
_processor_time = time.process_time  # processor time of all threads together


def measure_host(kernels: Kernels) -> Rates:
    """Measure the rates of the host: memory reads, operations, and attention with every KV format.

    This takes 0.2 seconds. Times are processor time of the threads, not wall-clock time, so that neither other
    processes nor a pause by a processor quota change the result.
    """

    def given(call: Callable[[], object]) -> float:
        return _processor_seconds(call, kernels.threads())

    one, weights = sample_block(2 * _UNITS)
    read = OF_MEMORY * weights.size / given(partial(kernels.ffn, one, weights, _tokens(1)))
    spec, data = sample_block(_LEAST_UNITS * 4)
    operations = _operations(spec) / given(partial(kernels.ffn, spec, data, _tokens(_TOKENS)))
    return Rates(read, operations, kv=KvRates(**{kv: _attending(kernels, kv) for kv in KV_DTYPES}))


def _attending(kernels: Kernels, kv_dtype: KvDtype) -> float:
    """Return the bytes of keys and values in the format `kv_dtype` that attention reads per second from the CPU's
    caches.
    """
    sample = AttentionSample.of(MIXTRAL, kv_dtype, _SEQUENCES, _CONTEXT, cached=True)
    return sample.nbytes / _processor_seconds(partial(sample.run, kernels), kernels.threads())


def free_memory(device: Device) -> int:
    """Return the free bytes of a device's memory; 512 MiB, enough for every sample, if it has no limit."""
    limit = device.memory.limit
    return (_MEMORY << 3) if limit is None else max(0, limit - device.memory.used)


def sample_sizes(room: int) -> list[int]:
    """Return the sizes in bytes of the samples that fit into `room` bytes, the largest first.

    A computation with a sample needs up to three times as much memory in addition to the sample.
    """
    return [size for size in reversed(SAMPLES) if _ROOM_FACTOR * size <= room]


def measure_device(device: Device, sample: int) -> Accelerator:
    """Measure how fast a device computes and copies, in both directions; note the memory that is free on it.

    `sample` is the size of the largest sample in bytes, one of `SAMPLES`. Larger samples predict large transfers
    better. The memory of the samples is freed at the end.

    Raises:
        DeviceError: if the device cannot copy or compute.
    """
    room = free_memory(device)
    link = measure_link(device, sample)
    rates, follow = _in_chains(device, sample, _computing(device, sample))
    return Accelerator(rates, room, link, device.name, follow=follow)


def measure_link(device: Device, room: int) -> DeviceLink:
    """Measure the link between the host and a device, with copies of at most `room` bytes.

    Rates come from the largest copy and latencies from the smallest. The result also has the smallest size of a copy
    that is almost as fast as the fastest.
    """
    sizes = [size for size in PIECES if size <= room] or [PIECES[0]]
    host_memory, device_memory = device.staging(sizes[-1]), device.memory.allocate(sizes[-1])
    try:
        up = [_copying(device, host_memory[:size], device_memory[:size]) for size in sizes]
        down = [_copying(device, device_memory[:size], host_memory[:size]) for size in sizes]
    finally:
        device.memory.free(device_memory)
    return link_of(sizes, up, down)


def link_of(sizes: Sequence[int], up: Sequence[float], down: Sequence[float]) -> DeviceLink:
    """Return the link on which copies of `sizes` bytes took `up` seconds to the device and `down` seconds back.

    The three sequences have the same length, and the sizes ascend.
    """
    rates = [_slope(sizes, seconds) for seconds in (up, down)]
    latency = max(0.0, min(up[0] - sizes[0] / rates[0], down[0] - sizes[0] / rates[1]))
    speeds = [size / seconds for size, seconds in zip(sizes, up, strict=True)]
    piece = next(size for size, speed in zip(sizes, speeds, strict=True) if speed >= GOOD_ENOUGH * max(speeds))
    return DeviceLink(rates[0], rates[1], latency, piece)


def sample_block(units: int) -> tuple[FfnSpec, Bytes]:
    """Return an FFN block of `units` units of 32 neurons in q4, and its weights, in memory that has been touched.

    The bytes are valid weights, so that no computation meets NaN.
    """
    parts = (Part("gate", "q4", "row"), Part("up", "q4", "row"), Part("down", "q4", "column"))
    run = RunLayout("neuron", "tiled", parts, FFN_UNIT, _HIDDEN, units)
    data = page_buffer(run.units * run.unit_bytes)
    data.fill(1)
    norm = NormSpec("rms", 1e-5, np.ones(_HIDDEN, np.float32))
    return FfnSpec(run, "silu", True, norm, None, None), data[: run.units * run.unit_bytes]


def _computing(device: Device, room: int) -> Rates:
    """Measure the rates of a device with a sample as large as `room` bytes allow, for one token and for many."""
    large, small = _samples(room)
    memory = device.memory.allocate(large[1].size)
    try:
        device.copy(large[1], memory).wait()
        one = _started(device, large[0], memory, 1)
        least = _started(device, small[0], memory[: small[1].size], 1)
        many = _started(device, large[0], memory, _TOKENS)
    finally:
        device.memory.free(memory)
    differs = large[1].size > small[1].size
    read = (large[1].size - small[1].size) / max(one - least, 1e-9) if differs else large[1].size / one
    start = max(0.0, least - small[1].size / read)
    return Rates(read, _operations(large[0]) / max(many - start, 1e-9), start)


def _samples(room: int) -> tuple[tuple[FfnSpec, Bytes], tuple[FfnSpec, Bytes]]:
    """Return a sample block as large as `room` bytes allow, and a small one."""
    units = room // sample_block(1)[1].size
    return sample_block(int(np.clip(units, _LEAST_UNITS, _UNITS))), sample_block(_LEAST_UNITS)


def _in_chains(device: Device, room: int, alone: Rates) -> tuple[Rates, float | None]:
    """Return the rates of a device, and the additional seconds of a block in a chain.

    Without chains, these are the rates `alone`, and None. In a chain, the card computes one block while the host
    launches the next. So the rates are also right if a launch takes longer than the block.
    """
    (large, data), (small, least) = _samples(room)
    count = max(1, room // data.size)  # several blocks, so that a card's cache does not hold all of them
    memory = device.memory.allocate(count * data.size)
    blocks = [ChainBlock(large, memory[at : at + data.size], Residual()) for at in range(0, memory.size, data.size)]
    try:
        if isinstance(device.kernels.open_chain(blocks), PlainChain):
            return alone, None
        for block in blocks:
            device.copy(data, block.data).wait()
        one, many = (_chained(device, blocks, tokens) for tokens in (1, _TOKENS))
        short = _chained(device, [ChainBlock(small, memory[: least.size], Residual())] * count, 1)
    finally:
        device.memory.free(memory)
    read = (data.size - least.size) / max(one - short, 1e-9) if data.size > least.size else data.size / one
    return Rates(read, _operations(large) / many, alone.start), max(0.0, short - least.size / read)


def _chained(device: Device, blocks: Sequence[ChainBlock], tokens: int) -> float:
    """Return the seconds of one of `blocks` in a chain, for `tokens` tokens: the start of the chain does not count."""
    first = np.arange(tokens, dtype=np.int32)
    x, batch = _tokens(tokens), Batch(first, np.zeros_like(first), np.zeros((1, -(-tokens // PAGE_TOKENS)), np.int32))
    chains = [device.kernels.open_chain(list(blocks) * times) for times in (1, 1 + _CHAINED)]
    short, long = (_fastest(partial(chain.run, x, batch)) for chain in chains)
    return max(long - short, 1e-9) / (_CHAINED * len(blocks))


def _copying(device: Device, source: Bytes, target: Bytes) -> float:
    return _fastest(lambda: device.copy(source, target).wait())


def _started(device: Device, spec: FfnSpec, data: Bytes, tokens: int) -> float:
    x = _tokens(tokens)
    return _fastest(lambda: device.start(lambda: device.kernels.ffn(spec, data, x)).wait())


def _tokens(count: int) -> F32:
    return np.ones((count, _HIDDEN), np.float32)


def _operations(spec: FfnSpec) -> float:
    """Return the operations that a block needs for the sample prompt: two for each weight and token."""
    run = spec.neuron
    return 2.0 * _TOKENS * run.units * run.width * run.hidden * len(run.parts)


def _slope(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the rate of copies in bytes per second, without their latency.

    The rate is the difference in size between the largest copy, the last one, and the smallest, the first one, divided
    by the difference of their times. If both took the same time, return the rate of the largest copy.
    """
    more, longer = sizes[-1] - sizes[0], seconds[-1] - seconds[0]
    return more / longer if more and longer > 0 else sizes[-1] / max(seconds[-1], 1e-9)


def _fastest(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest of three calls, after one call that is not timed."""
    call()
    return min(_seconds(call) for _ in range(_ROUNDS))


def _seconds(call: Callable[[], object]) -> float:
    begun = _wall_clock()
    call()
    return max(_wall_clock() - begun, 1e-9)


def _processor_seconds(call: Callable[[], object], threads: int) -> float:
    """Return the mean processor time that a call takes of each of `threads` threads, after one call that is not timed.

    A system may count the time of a running thread only every few milliseconds. So calls are repeated for much longer.
    """
    call()
    begun, calls = _processor_time(), 0
    while (taken := _processor_time() - begun) < _SPAN * threads and calls < _MOST_CALLS:
        call()
        calls += 1
    return max(taken, 1e-9) / (threads * calls)

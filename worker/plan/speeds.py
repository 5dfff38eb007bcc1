"""Measurement of this node's memory and disk, for the placement of its blocks."""

import time
from collections.abc import Callable

from scheduler.model.placement import Speeds
from scheduler.storage.tune import DiskSpeed
from tpi.devices.pages import Bytes, page_buffer
from tpi.kernels import Kernels
from worker.node_plan import NodePlan

_SAMPLE = 64 << 20  # bytes to read to measure memory: more than most CPU caches hold
_ROUNDS = 3  # measurements; the fastest counts
OF_MEMORY = 0.85  # fraction of the memory's speed that kernels reach in steps of few tokens
OF_DISK = 0.9  # fraction of the disk's speed that is left while all cores compute


def speeds_of(plan: NodePlan, disk: DiskSpeed, block: int, budget: int, kernels: Kernels) -> Speeds:
    """Measure the memory of this node and return the speeds that placement needs.

    `turn` in the result is the time between two tokens. In it, the master computes the head and reads a row of the
    embedding, and that read waits for all reads in flight. `start` is the time that a load loses because too few reads
    are in flight at its start and end: half of one read.

    Args:
        plan: the node's part of the deployment.
        disk: the measured disk.
        block: bytes of the smallest load.
        budget: bytes of memory; the measurement uses at most half of them for about 20 ms.
        kernels: the kernels that read the memory.
    """
    compute = OF_MEMORY * memory_speed(min(_SAMPLE, budget // 2), kernels)
    opened = disk.open(block)
    reading = opened.chunk / disk.bytes_per_second  # seconds of one read at full speed
    turn = head_bytes(plan) / compute + opened.threads * reading
    return Speeds(disk=OF_DISK * disk.bytes_per_second, compute=compute, turn=turn, start=reading / 2)


def memory_speed(size: int, kernels: Kernels, clock: Callable[[], float] = time.perf_counter) -> float:
    """Measure the bytes per second at which the kernels' threads read `size` bytes of memory.

    Args:
        clock: returns the time in seconds; called before and after each round.
    """
    data = page_buffer(size)
    data.fill(1)
    fastest = min(_seconds(data, kernels, clock) for _ in range(_ROUNDS))
    return data.size / max(fastest, 1e-9)


def head_bytes(plan: NodePlan) -> float:
    """Estimate the bytes of the head, as if its weights had the number format of this node's first FFN block."""
    neuron = next(plan.runs("neuron")).layout
    weights = len(neuron.parts) * neuron.width * neuron.hidden
    return plan.config.vocab * plan.config.hidden * neuron.unit_bytes / weights


def _seconds(data: Bytes, kernels: Kernels, clock: Callable[[], float]) -> float:
    begun = clock()
    kernels.read(data)
    return clock() - begun

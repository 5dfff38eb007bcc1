"""How fast this node computes, loads, and gets from one token to the next: what its blocks are placed for."""

import time
from collections.abc import Callable

from scheduler.model.placement import Speeds
from scheduler.storage.tune import DiskSpeed
from tpi.devices.pages import Bytes, page_buffer
from tpi.kernels import Kernels
from worker.plan.node_plan import NodePlan

_SAMPLE = 64 << 20  # bytes read to see how fast memory is: more than most caches keep
_ROUNDS = 3  # of which the fastest counts
OF_MEMORY = 0.85  # of the memory's speed is what kernels reach on few tokens
OF_DISK = 0.9  # of the disk's speed is left while all cores compute


def speeds_of(plan: NodePlan, disk: DiskSpeed, block: int, budget: int, kernels: Kernels) -> Speeds:
    """The speeds of this node; takes at most half of `budget` bytes for some 20 ms to measure them.

    Between two tokens the master computes the head and reads a row of the embedding, behind all reads in flight. At
    both ends of a load (the smallest takes `block` bytes) fewer reads are in flight than the disk likes: half of one is
    lost.
    """
    compute = OF_MEMORY * memory_speed(min(_SAMPLE, budget // 2), kernels)
    opened = disk.open(block)
    reading = opened.chunk / disk.bytes_per_second  # seconds of a read at full speed
    turn = head_bytes(plan) / compute + opened.threads * reading
    return Speeds(disk=OF_DISK * disk.bytes_per_second, compute=compute, turn=turn, start=reading / 2)


def memory_speed(size: int, kernels: Kernels, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes per second at which the kernels' threads read `size` bytes of memory, and do nothing else.

    `clock` is read around each round, in seconds.
    """
    data = page_buffer(size)
    data.fill(1)
    fastest = min(_seconds(data, kernels, clock) for _ in range(_ROUNDS))
    return data.size / max(fastest, 1e-9)


def head_bytes(plan: NodePlan) -> float:
    """About how many bytes the head has: its weights are taken to be as wide as those of this node's first FFN."""
    neuron = next(plan.runs("neuron")).layout
    weights = len(neuron.parts) * neuron.width * neuron.hidden
    return plan.config.vocab * plan.config.hidden * neuron.unit_bytes / weights


def _seconds(data: Bytes, kernels: Kernels, clock: Callable[[], float]) -> float:
    begun = clock()
    kernels.read(data)
    return clock() - begun

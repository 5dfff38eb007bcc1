"""Small machines and models to plan, and a simple reference for the timeline of one candidate."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.model.machine import Accelerator, DeviceLink, DiskRate, NodeMachine, Rates
from scheduler.model.offload.timeline import ACCELERATOR_SLOTS, HOST_SLOTS
from scheduler.model.offload.work import NodeWork, Offload, Place, SegmentWork, TableWork, Tier

ATTENTION, FFN = 100, 300  # bytes
MACHINE = NodeMachine(
    host=Rates(read=100.0, operations=1e9),
    memory=10_000_000,
    disk=DiskRate(read=50.0),
    accelerator=Accelerator(Rates(read=1000.0, operations=1e12), 10_000_000, DeviceLink(200.0, 100.0, piece=10)),
)


def layers(count: int, kv_token: int = 0, ffn_parts: int = 1, head: int = 0) -> NodeWork:
    """Return `count` layers of an attention segment of 100 bytes and an FFN block of 300; no hidden states cross."""
    segments: list[SegmentWork] = []
    for layer in range(count):
        segments.append(SegmentWork(2 * layer, "attention", ATTENTION, ATTENTION, kv_token, 4))
        segments += [SegmentWork(2 * layer + 1, "ffn", FFN // ffn_parts, FFN // ffn_parts)] * ffn_parts
    return NodeWork(tuple(segments), 0, TableWork(head, head))


def offload(
    residence: Sequence[Tier], places: Sequence[Place] | None = None, kv: str = "ram", pipeline: str = "performance"
) -> Offload:
    """Return a configuration with the same `places` in both phases, by default where each segment is resident."""
    found = tuple(places or ["accelerator" if tier == "gpu" else "host" for tier in residence])
    return Offload(tuple(residence), found, found, kv, pipeline)  # type: ignore[arg-type]


@dataclass
class PlainClock:
    """The clock of one candidate: when each lane is free, and when the n-th user of a slot released it."""

    free: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("disk", "up", "down", "there", "here"), 0.0))
    given_back: dict[str, list[float]] = field(default_factory=lambda: {"ram": [], "gpu": [], "kv": []})

    def do(self, lane: str, seconds: float, *after: float) -> float:
        """Return the end of a task of `seconds` that waits for its lane and for the given ends."""
        self.free[lane] = max(self.free[lane], *after) + seconds
        return self.free[lane]

    def slot(self, name: str, count: int) -> float:
        """Return the time from which the next user may have one of `count` slots."""
        used = self.given_back[name]
        return used[len(used) - count] if len(used) >= count else 0.0


def plain_ends(work: NodeWork, chosen: Offload, seconds: dict[str, list[float]], steps: int) -> list[float]:
    """Return the end of each of `steps` decode steps. `seconds` has a list per kind of task, named as in `Tasks`."""
    clock, ready, saved, ends = PlainClock(), 0.0, dict[int, float](), []
    alone, slots, ram = chosen.pipeline == "memory", ACCELERATOR_SLOTS[chosen.pipeline], HOST_SLOTS[chosen.pipeline]
    for _ in range(steps):
        for block in work.blocks:
            ended, turn = ready, ready if alone else 0.0
            for at in block:
                first = last = arrived = 0.0
                there, tier = chosen.decode[at] == "accelerator", chosen.residence[at]
                if tier == "disk":
                    last = clock.do("disk", seconds["read"][at], clock.slot("ram", ram), turn)
                    first = last - seconds["read"][at] + seconds["first_read"][at]
                if there and tier != "gpu":
                    clock.do("up", seconds["up"][at], clock.slot("gpu", slots), turn, first)
                    arrived = clock.free["up"] = max(clock.free["up"], last + seconds["last_up"][at] if last else 0.0)
                if with_kv := there and chosen.kv == "ram" and work.segments[at].kv_token > 0:
                    kv_slot = clock.slot("kv", slots)
                    arrived = clock.do("up", seconds["kv_up"][at], kv_slot, turn, saved.get(at, 0.0))
                lane = "there" if there else "here"
                took = seconds["accelerator" if there else "host"][at]
                end = clock.do(lane, took, ready, arrived if there else last)
                if there and tier != "gpu":
                    clock.given_back["gpu"].append(end)
                if tier == "disk":
                    clock.given_back["ram"].append(arrived if there else end)
                if with_kv:
                    saved[at] = clock.do("down", seconds["kv_down"][at], end)
                    clock.given_back["kv"].append(saved[at])
                    end = saved[at] if alone else end
                ended = max(ended, end)
            ready = ended
        ends.append(ready)
    return ends

"""The exact timeline of one node that computes on two devices: five lanes, each of which does its tasks in order.

    disk         reads a segment into one of a few slots in RAM
    up           copies weights to a slot of the accelerator, and keys and values, piece by piece behind the disk
    accelerator  computes; hidden states cross before and after
    host         computes where the weights are
    down         copies the keys and values of new tokens back

A block begins when the block before it has ended. Its segments are computed on both devices at once, and it ends when
all of them have ended. In the *performance* pipeline loads run one segment ahead of the segment in use, and a save is
waited for only when its data is loaded again. In the *memory* pipeline there is one slot, and nothing is loaded or
saved during other work (PIPO, 3.2).

Each of several accelerators has its own slots and lanes. If some segments come from disk, segments are requested in the
order of use, whichever accelerator they go to. Segments from disk are copied up one after the other, because the
memory window has a single reader.

Each task starts at the latest end of the tasks before it, so nothing ends earlier when a task takes longer. Several
candidates are simulated at once: every time is an array `[candidates]`. The host's memory, which all lanes but the
accelerator share, is not a lane: a step takes at least as long as that memory is busy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler.model.offload.tasks import F64, Candidates, Mask, Tasks, busy_seconds, longest
from scheduler.model.offload.work import Pipeline

ACCELERATOR_SLOTS: dict[Pipeline, int] = {"performance": 2, "memory": 1}  # slots for segments, and for layers' pages
HOST_SLOTS: dict[Pipeline, int] = {"performance": 3, "memory": 1}  # slots in RAM for segments from disk


@dataclass(frozen=True)
class OffloadTimes:
    """Seconds of each consecutive step, `[steps, candidates]`, and the seconds that each lane is busy in one step."""

    steps: F64
    busy: dict[str, F64]


def simulate_steps(
    tasks: Tasks, candidates: Candidates, blocks: Sequence[range], pipeline: Pipeline, steps: int = 2, slots: int = 0
) -> OffloadTimes:
    """Simulate `steps` equal steps in a row, starting with empty slots.

    A step takes at least as long as the host's memory is busy. `slots` is the number of segment slots on the
    accelerator, if it has more than the pipeline needs.
    """
    clock = _Clock(tasks, candidates, pipeline, slots)
    ends = [np.zeros(len(candidates.head_read))]
    for _ in range(steps):
        for numbers in blocks:
            clock.block(numbers)
        ends.append(clock.head())
    busy = busy_seconds(tasks, candidates)
    return OffloadTimes(np.maximum(np.diff(np.array(ends), axis=0), busy["bus"]), busy)


class _Clock:
    """The time at which each lane of the node becomes free, in seconds, `[candidates]` each."""

    def __init__(self, tasks: Tasks, candidates: Candidates, pipeline: Pipeline, slots: int = 0) -> None:
        self._tasks, self._masks, self._one_slot = tasks, candidates, pipeline == "memory"
        self._there, self._heads = tasks.on_card(candidates), sum(tasks.heads(candidates))
        never = np.zeros(len(candidates.head_read))
        self._disk = self._host = self._ready = self._opened = self._taken = never
        self._host_slots = _Slots(never, HOST_SLOTS[pipeline])
        kv_slots = ACCELERATOR_SLOTS[pipeline]
        self._cards = {card: _Card(never, slots or kv_slots, kv_slots) for card in tasks.numbers}
        self._several, self._in_turn = len(self._cards) > 1, (candidates.disk & candidates.up).any(axis=0)
        self._saved: dict[int, F64] = {}
        self._never = never
        self._reads, self._copied, self._kv = (
            [bool(row.any()) for row in mask] for mask in (candidates.disk, candidates.up, candidates.kv_up)
        )

    def block(self, numbers: range) -> None:
        """Simulate the segments of one block, from its input to the end of its exchange."""
        ended = self._ready
        for number in numbers:
            ended = np.maximum(ended, self._segment(number))
        self._ready = ended + self._tasks.exchange

    def head(self) -> F64:
        """Simulate the head after the last block; return the time at which the step ends."""
        read = np.maximum(self._disk, self._ready) + self._tasks.head_read
        self._disk = np.where(self._masks.head_read, read, self._disk)
        self._ready = np.maximum(self._ready + self._heads, np.where(self._masks.head_read, read, 0.0))
        self._host = self._ready
        return self._ready

    def _segment(self, number: int) -> F64:
        """Simulate loading, computing and saving the segment `number`. Return the time at which the segment ends."""
        masks, tasks, card = self._masks, self._tasks, self._card(number)
        here = self._read(number) if self._reads[number] else (self._never, self._never)
        arrived = self._copy_up(number, *here) if self._copied[number] else self._never
        if self._kv[number]:
            arrived = np.maximum(arrived, self._load_kv(number))
        there = masks.on_accelerator[number]
        ended_card = longest(card.computing, self._ready, arrived) + self._there[number]
        ended_host = longest(self._host, self._ready, here[1]) + tasks.host[number]
        card.computing = np.where(there, ended_card, card.computing)
        self._host = np.where(there, self._host, ended_host)
        ended = np.where(there, ended_card, ended_host)
        if self._copied[number]:
            card.slots.release(masks.up[number], ended)
        if self._reads[number]:
            self._host_slots.release(masks.disk[number], np.where(there, arrived, ended))
        return self._save_kv(number, ended) if self._kv[number] else ended

    def _read(self, number: int) -> tuple[F64, F64]:
        """Simulate reading a segment from disk; return when its first piece is in RAM, and when all of it is."""
        wanted = self._masks.disk[number]
        begun = longest(self._disk, self._host_slots.free, self._turn)
        ended = begun + self._tasks.read[number]
        self._disk = np.where(wanted, ended, self._disk)
        return np.where(wanted, begun + self._tasks.first_read[number], 0.0), np.where(wanted, ended, 0.0)

    def _copy_up(self, number: int, first: F64, last: F64) -> F64:
        """Simulate copying a segment to the accelerator, piece by piece; return the time at which it has arrived."""
        wanted, card = self._masks.up[number], self._card(number)
        begun = longest(card.up, card.slots.free, self._turn, first)
        if self._several:
            self._opened = np.where(wanted & self._in_turn, longest(self._opened, card.slots.free), self._opened)
            begun = longest(begun, self._opened, np.where(self._masks.disk[number], self._taken, 0.0))
        ended = np.maximum(begun + self._tasks.up[number], last + self._tasks.last_up[number])
        card.up = np.where(wanted, ended, card.up)
        self._taken = np.where(wanted & self._masks.disk[number], ended, self._taken)
        return np.where(wanted, ended, 0.0)

    def _load_kv(self, number: int) -> F64:
        """Simulate copying a layer's keys and values to the accelerator; return the time at which they have arrived.

        The copy begins after the previous step's new keys and values were saved.
        """
        wanted, card = self._masks.kv_up[number], self._card(number)
        saved = self._saved.get(number, self._never)
        begun = longest(card.up, card.kv_slots.free, self._turn, saved)
        ended = begun + self._tasks.kv_up[number]
        card.up = np.where(wanted, ended, card.up)
        return np.where(wanted, ended, 0.0)

    def _save_kv(self, number: int, ended: F64) -> F64:
        """Simulate saving a segment's new keys and values from the time `ended` on.

        Return the time at which the next segment may begin.
        """
        wanted, card = self._masks.kv_up[number], self._card(number)
        saved = np.maximum(card.down, ended) + self._tasks.kv_down[number]
        card.down = np.where(wanted, saved, card.down)
        self._saved[number] = np.where(wanted, saved, 0.0)
        card.kv_slots.release(wanted, saved)
        return np.where(wanted, saved, ended) if self._one_slot else ended

    def _card(self, number: int) -> "_Card":
        return self._cards[self._tasks.card(number)]

    @property
    def _turn(self) -> F64:
        """The earliest time at which a load may start.

        In the memory pipeline with one accelerator, it is the end of the block before; else there is no limit.
        """
        return self._ready if self._one_slot and not self._several else self._never


class _Card:
    """The time at which each lane and each slot of one accelerator becomes free."""

    def __init__(self, never: F64, slots: int, kv_slots: int) -> None:
        self.up = self.down = self.computing = never
        self.slots, self.kv_slots = _Slots(never, slots), _Slots(never, kv_slots)


@dataclass
class _Slots:
    """The time at which each of a few slots is free again. The slot that was released first is used next."""

    never: F64
    count: int
    released: list[F64] = field(init=False)

    def __post_init__(self) -> None:
        self.released = [self.never] * self.count

    @property
    def free(self) -> F64:
        return self.released[0]

    def release(self, wanted: Mask, at: F64) -> None:
        """Mark the next slot as free from the time `at` on, for the candidates in `wanted`."""
        later = [*self.released[1:], at]
        self.released = [np.where(wanted, new, old) for new, old in zip(later, self.released, strict=True)]

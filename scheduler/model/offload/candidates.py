"""The residences that are compared: which segments are resident on the accelerator, in RAM, or on disk.

All segments are put in an order. The accelerator gets the first segments, RAM gets as many of the others as it has room
for, and the rest is on disk. So more memory only adds resident segments. Three orders are tried: FFN segments first,
attention segments first, or layer by layer. Attention is best computed where its keys and values are, so the two kinds
may belong in different places. In each order, the layers of any number of first segments are spread evenly over the
cycle.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from scheduler.model.offload.memory import head_tiles
from scheduler.model.offload.problem import I64, Problem
from scheduler.model.offload.tasks import Candidates, Mask
from scheduler.model.offload.timeline import ACCELERATOR_SLOTS, HOST_SLOTS
from scheduler.model.offload.work import (
    PLACES,
    Cards,
    KvTier,
    Offload,
    Pipeline,
    Place,
    Tier,
    kv_pages,
)

T = TypeVar("T")

# Number of ways to compute the segments that are not resident on the accelerator. The accelerator computes the kinds
# whose bits are set, the host the others: attention in RAM (1), attention on disk (2), FFN in RAM (4), FFN on disk (8).
WAYS = 16
_MOST_COUNTS = 24  # numbers of segments resident on the accelerator that are compared, per order


@dataclass(frozen=True)
class Residences:
    """Candidate residences for one place of the keys and values and one pipeline.

    Attributes:
        kv: where keys and values are.
        pipeline: the pipeline.
        gpu: which segments are resident on an accelerator, `[segments, candidates]`.
        disk: which segments are on disk, `[segments, candidates]`.
        attends: which segments are attention's, `[segments, 1]`.
        head_read: whether the head is read from disk.
        cards: the accelerator of each segment.
    """

    kv: KvTier
    pipeline: Pipeline
    gpu: Mask
    disk: Mask
    attends: Mask
    head_read: bool
    cards: Cards = ()

    @property
    def count(self) -> int:
        """Number of candidates."""
        return len(self.gpu[0])

    def on_accelerator(self, way: int, columns: Sequence[int] | slice = slice(None)) -> Mask:
        """Return which segments the accelerator computes: its resident segments, and the kinds of segments that `way`
        names.

        `WAYS` describes the bits of `way`. The result is `[segments, candidates]`, for the candidates in `columns`.
        """
        gpu, disk = self.gpu[:, columns], self.disk[:, columns]
        taken = [np.where(disk, way & 2 << shift, way & 1 << shift) > 0 for shift in (0, 2)]
        return gpu | np.where(self.attends, *taken)

    def redundant(self, way: int) -> Mask:
        """Return for which candidates `way` computes the same as a way with fewer bits, `[candidates]`.

        This is so if a candidate has no segment of one of the kinds that `way` names.
        """
        outside = ~self.gpu
        kinds = [outside & ~self.disk & self.attends, self.disk & self.attends]
        kinds += [outside & ~self.disk & ~self.attends, self.disk & ~self.attends]
        found = np.zeros(self.count, np.bool_)
        for bit, kind in enumerate(kinds):
            found |= ~kind.any(axis=0) & bool(way & 1 << bit)
        return found

    def candidates(self, way: int, columns: Sequence[int] | slice = slice(None)) -> Candidates:
        """Return the candidates in `columns` with the places of computing that `way` names, ready for simulation."""
        there, gpu = self.on_accelerator(way, columns), self.gpu[:, columns]
        kv_up = there & self.attends & (self.kv == "ram")
        return Candidates(self.disk[:, columns], there & ~gpu, there, kv_up, np.full(gpu.shape[1], self.head_read))

    def offload(self, column: int, prompt: int, decode: int) -> Offload:
        """Return the candidate in `column` as a complete configuration.

        `prompt` and `decode` are the numbers of its ways of computing prompts and single tokens.
        """
        tiers: list[Tier] = [
            "gpu" if gpu else "disk" if disk else "ram"
            for gpu, disk in zip(self.gpu[:, column], self.disk[:, column], strict=True)
        ]
        first, then = self._places(prompt, column), self._places(decode, column)
        head: Tier = "disk" if self.head_read else "ram"
        return Offload(tuple(tiers), first, then, self.kv, self.pipeline, head, cards=self.cards)

    def _places(self, way: int, column: int) -> tuple[Place, ...]:
        return tuple(PLACES[int(there)] for there in self.on_accelerator(way, [column])[:, 0])


def residences(problem: Problem, kv: KvTier, pipeline: Pipeline) -> Residences | None:
    """Return all candidates that fit into the host's memory; None if there are none."""
    sizes, attends, weights = problem.sizes, problem.attends, problem.limits.weights
    room, head_read = _room(problem, kv, pipeline)
    if room < 0:
        return None
    gpu = np.unique(list(_resident_masks(problem)), axis=0).T
    outside, left = np.where(gpu, 0, sizes), room - _shared_bytes(problem, gpu, kv, pipeline)
    slots = np.minimum(HOST_SLOTS[pipeline] * outside.max(axis=0), outside.sum(axis=0))
    fits = outside.sum(axis=0) <= left
    order = _kept_first(problem)
    beginning = np.empty_like(gpu)
    beginning[order] = np.cumsum(outside[order], axis=0) <= left - slots
    disk = np.full_like(gpu, True) if weights == "disk" else ~(beginning | fits)
    disk &= ~gpu
    possible = (left >= slots) | (~disk.any(axis=0) & (left >= 0))
    if weights == "ram":
        possible &= ~disk.any(axis=0)
    if not possible.any():
        return None
    return Residences(kv, pipeline, gpu[:, possible], disk[:, possible], attends, head_read, problem.cards)


def _shared_bytes(problem: Problem, gpu: Mask, kv: KvTier, pipeline: Pipeline) -> I64:
    """Return the bytes of RAM, for each candidate, that accelerators take which share the host's memory,
    `[candidates]`.

    `gpu` marks their resident segments. If there are any, the result includes the most that slots for streamed segments
    and the kernels' buffers can take.
    """
    if not problem.machine.shared:
        return np.zeros(gpu.shape[1], np.int64)
    most = int(problem.sizes.max(initial=0))
    buffers = ACCELERATOR_SLOTS[pipeline] * most + problem.needs.card_need.nbytes(problem.tokens)
    pages = kv_pages(problem.work, problem.request) if kv == "gpu" else 0
    found: I64 = (
        np.where(gpu, problem.sizes, 0).sum(axis=0) + np.where(gpu.any(axis=0) | bool(pages), buffers, 0) + pages
    )
    return found


def evenly(items: Sequence[T]) -> list[T]:
    """Return `items` in an order of which any number of first items is about evenly spaced.

    The order is van der Corput's sequence.
    """
    return [items[at] for at in sorted(range(len(items)), key=_reversed_bits)]


def _reversed_bits(number: int) -> float:
    found, step = 0.0, 0.5
    while number:
        found, number, step = found + step * (number & 1), number >> 1, step / 2
    return found


def _resident_masks(problem: Problem) -> Iterator[Mask]:
    """Yield the masks of segments that may be resident on the accelerators, `[segments]` each."""
    count = len(problem.work.segments)
    weights = problem.limits.weights
    if not problem.machine.cards or weights:
        yield np.full(count, weights == "gpu")
        return
    for order in _orders(problem):
        of_cards = [[at for at in order if problem.dealt(card)[at, 0]] for card in range(len(problem.machine.cards))]
        ends = [np.cumsum([0, *problem.sizes[mine, 0]]) for mine in of_cards]
        for left in sorted(_free_sizes(problem, ends)):
            mask = np.zeros(count, np.bool_)
            for mine, end, card in zip(of_cards, ends, problem.machine.cards, strict=True):
                mask[mine[: max(0, int(np.searchsorted(end, card.memory - left, side="right")) - 1)]] = True
            yield mask


def _free_sizes(problem: Problem, ends: Sequence[I64]) -> set[int]:
    """Return the numbers of free bytes to try: what resident segments leave of an accelerator's memory.

    `ends[card][n]` is the bytes of the first n segments of an accelerator. About `_MOST_COUNTS` numbers of segments are
    tried, and every number that leaves little free (`_most_other_bytes`).
    """
    reserve, step = _most_other_bytes(problem), -(-len(problem.work.segments) // _MOST_COUNTS)
    found: set[int] = set()
    for end, card in zip(ends, problem.machine.cards, strict=True):
        least, most = np.searchsorted(end, [card.memory - reserve, card.memory], side="right") - 1
        counts = {*range(0, most, step), *range(max(0, least), most + 1)}
        found |= {card.memory - int(end[count]) for count in counts}
    return found


def _most_other_bytes(problem: Problem) -> int:
    """Return the most bytes that the accelerator needs for all purposes except resident segments."""
    slots = max(ACCELERATOR_SLOTS.values()) * int(problem.sizes.max())
    return kv_pages(problem.work, problem.request) + slots + problem.needs.card_need.nbytes(problem.tokens)


def _orders(problem: Problem) -> list[list[int]]:
    layers = _layers(problem)
    order = [number for layer in evenly(layers) for number in layer]
    attention = [number for number in order if problem.attends[number, 0]]
    ffn = [number for number in order if not problem.attends[number, 0]]
    return [ffn + attention, attention + ffn, order]


def _kept_first(problem: Problem) -> list[int]:
    """Return the segments in the order in which they get a place in RAM.

    Without an accelerator, experts are read from disk one by one, and a token needs few of them. So segments of experts
    come last.
    """
    order = _orders(problem)[-1]
    if problem.machine.cards:
        return order
    parts = [segment.touched(1) / max(1, segment.nbytes) for segment in problem.work.segments]
    return sorted(order, key=lambda number: -parts[number])


def _layers(problem: Problem) -> list[list[int]]:
    """Return the numbers of each layer's segments; a layer begins with its first attention segment."""
    found: list[list[int]] = []
    attended = False
    for number, attends in enumerate(problem.attends[:, 0].tolist()):
        if not found or (attends and not attended):
            found.append([])
        found[-1].append(number)
        attended = attends
    return found


def _room(problem: Problem, kv: KvTier, pipeline: Pipeline) -> tuple[int, bool]:
    """Return the bytes of RAM for segments, and True if the head must be read from disk because RAM cannot hold it."""
    request, needs = problem.request, problem.needs
    room = problem.machine.memory - needs.fixed - problem.tokens * needs.token
    room -= kv_pages(problem.work, request) if kv == "ram" else 0
    head = problem.work.head.nbytes
    if room - head >= HOST_SLOTS[pipeline] * max(segment.nbytes for segment in problem.work.segments):
        return room - head, False
    return room - head_tiles(problem.work), True

"""The time of every task of a step, the tasks that each candidate does, and a lower bound of the step's time.

All candidates of a search are compared at once: arrays are `[segments, candidates]`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from scheduler.model.machine import Accelerator, NodeMachine, Rates, laptop_gpu
from scheduler.model.offload.work import (
    VALUE,
    Cards,
    NodeWork,
    Offload,
    Pipeline,
    RequestPhase,
    SegmentWork,
    StepSize,
)

F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Tasks:
    """Seconds that each task of a step would take, `[segments, 1]`, whether or not a candidate does it.

    Each accelerator task is timed for the accelerator that the segment is dealt to.

    Attributes:
        read: read a segment from disk.
        first_read: read its first piece; the copy to the accelerator may begin after it.
        up: copy it to the accelerator.
        last_up: copy its last piece.
        kv_up: copy its keys and values to the accelerator.
        kv_down: copy the keys and values of new tokens back.
        accelerator: compute it on the accelerator.
        host: compute it on the host.
        weights_bus: pass its weights through the host's memory.
        host_bus: read from the host's memory the weights that the host computes with (of experts, the chosen ones).
        host_kv_bus: read its keys and values for computing on the host.
        kv_bus: load and save its keys and values.
        head: compute the head.
        head_read: read the head from disk.
        exchange: exchange with other nodes after a block.
        cards: the accelerator of each segment.
        chained: compute it on the accelerator in a chain of all segments (`Candidates.chained`); None: no chains.
        around_chain: start a chain, copy hidden states there and back, and compute the head if its table is there.
        head_after: compute the head on the host after a chain; 0 if it is on the accelerator.
    """

    read: F64
    first_read: F64
    up: F64
    last_up: F64
    kv_up: F64
    kv_down: F64
    accelerator: F64
    host: F64
    weights_bus: F64
    host_bus: F64
    host_kv_bus: F64
    kv_bus: F64
    head: float
    head_read: float
    exchange: float
    cards: Cards = ()
    chained: F64 | None = None
    around_chain: float = 0.0
    head_after: float = 0.0

    @property
    def numbers(self) -> list[int]:
        """The accelerators that have segments."""
        return sorted(set(self.cards)) or [0]

    def card(self, segment: int) -> int:
        """Return the accelerator that a segment is dealt to."""
        return self.cards[segment] if self.cards else 0

    def dealt(self, card: int) -> Mask:
        """Return which segments belong to the accelerator `card`, `[segments, 1]`."""
        return _dealt(self.cards, card, len(self.host))

    def on_card(self, candidates: "Candidates") -> F64:
        """Return the seconds of each segment on its accelerator, `[segments, candidates]` or `[segments, 1]`."""
        if self.chained is None:
            return self.accelerator
        found: F64 = np.where(candidates.chained, self.chained, self.accelerator)
        return found

    def heads(self, candidates: "Candidates") -> tuple[F64, F64]:
        """Return the seconds of the head on the host, and those that a chain adds on the accelerator, `[candidates]`
        each.
        """
        after = candidates.chained if self.chained is not None else np.zeros(len(candidates.head_read), np.bool_)
        return np.where(after, self.head_after, self.head), np.where(after, self.around_chain, 0.0)

    @classmethod
    def of(
        cls,
        work: NodeWork,
        machine: NodeMachine,
        step: StepSize,
        exchange: float = 0.0,
        cards: Cards = (),
        chains: bool = False,
        head_there: bool = False,
    ) -> "Tasks":
        """Return the tasks of a step of this size; the nodes exchange for `exchange` seconds after each block.

        Args:
            work: the segments and the head.
            machine: computes and stores them.
            step: the size of the step.
            exchange: seconds after each block.
            cards: the accelerator of each segment.
            chains: True if the accelerator may compute all segments as a chain.
            head_there: True if it computes the head after a chain.
        """
        devices = machine.cards or (laptop_gpu(),)
        mine = [devices[card] for card in cards or (0,) * len(work.segments)]
        link = _Links.of(mine)
        sizes = _column([segment.nbytes for segment in work.segments])
        touched = _column([segment.touched(step.tokens) for segment in work.segments])
        read = sizes if machine.cards else touched
        kv = _column([segment.kv_token for segment in work.segments])
        pieces = np.minimum(sizes, link.piece)
        host_head = machine.host.seconds(work.head.nbytes, 2.0 * work.head.weights * step.sequences)
        loaded, saved = kv * step.cached * step.sequences, kv * step.tokens
        return cls(
            read=machine.disk.latency + read / machine.disk.read,
            first_read=machine.disk.latency + pieces / machine.disk.read,
            up=link.latency + sizes / link.up,
            last_up=pieces / link.up,
            kv_up=np.where(loaded > 0, link.latency + loaded / link.up, 0.0),
            kv_down=np.where(saved > 0, link.latency + saved / link.down, 0.0),
            accelerator=_on_accelerator(work, mine, step, cards),
            host=machine.host.start + _column([_computing(machine.host, segment, step) for segment in work.segments]),
            weights_bus=read / machine.bus,
            host_bus=touched / machine.bus,
            host_kv_bus=kv * step.context * step.sequences / machine.bus,
            kv_bus=(loaded + saved) / machine.bus,
            head=host_head,
            head_read=work.head.nbytes / machine.disk.read,
            exchange=exchange,
            cards=cards,
            chained=_chained(work, devices[0], step) if chains else None,
            around_chain=_around_chain(work, devices[0], step, head_there),
            head_after=0.0 if head_there else host_head,
        )


@dataclass(frozen=True)
class _Links:
    """The figures of the link to each segment's accelerator, `[segments, 1]` each."""

    up: F64
    down: F64
    latency: F64
    piece: F64

    @classmethod
    def of(cls, devices: Sequence[Accelerator]) -> "_Links":
        return cls(*(_column([getattr(device.link, name.name) for device in devices]) for name in fields(cls)))


@dataclass(frozen=True)
class Candidates:
    """Ways to do the same step. Arrays are `[segments, candidates]`, or `[candidates]` if all segments are alike."""

    disk: Mask  # the segment is on disk
    up: Mask  # it is copied to the accelerator
    on_accelerator: Mask  # it is computed on the accelerator
    kv_up: Mask  # it is attention computed on the accelerator, with keys and values from RAM
    head_read: Mask  # the head is read from disk

    @property
    def chained(self) -> Mask:
        """Mask of the candidates that have all weights, keys and values in the accelerator's memory, `[candidates]`.

        The accelerator can then compute a step of a lone node as a chain of blocks.
        """
        found: Mask = np.logical_and.reduce(self.on_accelerator & ~self.up & ~self.kv_up, axis=0)
        return found

    @classmethod
    def of(cls, work: NodeWork, offloads: Sequence[Offload], phase: RequestPhase) -> "Candidates":
        """Return the candidates `offloads` of the node's work in the phase `phase`."""
        tiers = np.array([offload.residence for offload in offloads]).T
        there = np.array([offload.places(phase) for offload in offloads]).T == "accelerator"
        attends = _column([segment.kv_token for segment in work.segments]) > 0
        kv_in_ram = np.array([offload.kv == "ram" for offload in offloads])
        head = np.array([offload.head == "disk" for offload in offloads])
        return cls(tiers == "disk", there & (tiers != "gpu"), there, there & attends & kv_in_ram, head)

    @classmethod
    def joined(cls, parts: Sequence["Candidates"]) -> "Candidates":
        """Return all candidates of `parts`, in order."""
        return cls(*(np.concatenate([getattr(part, name.name) for part in parts], axis=-1) for name in fields(cls)))


def bound(tasks: Tasks, candidates: Candidates, blocks: Sequence[range], pipeline: Pipeline) -> F64:
    """Return a lower bound of a step's mean seconds over many steps, calculated without simulation: `[candidates]`.

    The bound is the maximum of the computing time and each lane's busy time. In the memory pipeline with one
    accelerator, a segment is copied to the only slot after the segment before it was computed. So the times of copying
    and computing add up. With several accelerators, one may copy while another computes.
    """
    busy = busy_seconds(tasks, candidates)
    starts = [numbers.start for numbers in blocks]

    def chain(mask: Mask, seconds: F64) -> F64:
        of_blocks: F64 = np.add.reduceat(np.where(mask, seconds, 0.0), starts)
        return of_blocks

    chains = [chain(~candidates.on_accelerator, tasks.host)]
    there = tasks.on_card(candidates)
    chains += [chain(candidates.on_accelerator & tasks.dealt(card), there) for card in tasks.numbers]
    if pipeline == "memory" and len(tasks.numbers) == 1:
        chains.append(chain(candidates.up, tasks.up + tasks.accelerator))
        chains.append(chain(candidates.kv_up, tasks.kv_up + tasks.accelerator + tasks.kv_down))
    computing = longest(*chains).sum(axis=0) + len(blocks) * tasks.exchange + sum(tasks.heads(candidates))
    return longest(computing, *busy.values())


def busy_seconds(tasks: Tasks, candidates: Candidates) -> dict[str, F64]:
    """Return the seconds that each lane and the host's memory (`bus`) are busy in a step: `[candidates]` each.

    The lanes of a second accelerator are called `up 2` and so on.
    """
    masks, there = candidates, tasks.on_card(candidates)
    head, head_there = tasks.heads(candidates)

    def total(mask: Mask, seconds: F64) -> F64:
        taken: F64 = np.where(mask, seconds, 0.0).sum(axis=0)
        return taken

    def of_card(card: int) -> dict[str, F64]:
        mine, number = tasks.dealt(card), f" {card + 1}" if card else ""
        return {
            f"up{number}": total(masks.up & mine, tasks.up) + total(masks.kv_up & mine, tasks.kv_up),
            f"down{number}": total(masks.kv_up & mine, tasks.kv_down),
            f"accelerator{number}": total(masks.on_accelerator & mine, there) + (0.0 if card else head_there),
        }

    return {
        "disk": total(masks.disk, tasks.read) + np.where(masks.head_read, tasks.head_read, 0.0),
        **{name: seconds for card in tasks.numbers for name, seconds in of_card(card).items()},
        "host": total(~masks.on_accelerator, tasks.host) + head,
        "bus": total(~masks.on_accelerator, tasks.host_bus + tasks.host_kv_bus)
        + total(masks.up, tasks.weights_bus)
        + total(masks.disk, tasks.weights_bus)
        + total(masks.kv_up, tasks.kv_bus),
    }


def longest(first: F64, *others: F64) -> F64:
    """Return the largest value, element by element."""
    for other in others:
        first = np.maximum(first, other)
    return first


def _on_accelerator(work: NodeWork, devices: Sequence[Accelerator], step: StepSize, cards: Cards) -> F64:
    """Return the seconds of each segment on its accelerator, `[segments, 1]`.

    A block's transfers of hidden states are divided among its segments, by bytes.
    """
    link = _Links.of(devices)
    crossing = step.tokens * work.crossing * (1 / link.up + 1 / link.down) + 2 * link.latency
    sizes = _column([segment.nbytes for segment in work.segments])
    starts = [numbers.start for numbers in work.blocks]
    of_block = np.zeros_like(sizes)
    for card in set(cards) or {0}:
        mine = _dealt(cards, card, len(sizes))
        totals = np.add.reduceat(np.where(mine, sizes, 0.0), starts)
        of_block += np.where(mine, np.repeat(totals, [len(numbers) for numbers in work.blocks], axis=0), 0.0)
    pairs = zip(work.segments, devices, strict=True)
    computing = [device.rates.start + _computing(device.rates, segment, step) for segment, device in pairs]
    found: F64 = _column(computing) + sizes / np.maximum(of_block, 1) * crossing  # a block without bytes: none here
    return found


def _chained(work: NodeWork, card: Accelerator, step: StepSize) -> F64:
    """Return the seconds of each segment in a chain on `card`, which has chains, `[segments, 1]`."""
    assert card.follow is not None
    return _column([card.follow + _computing(card.rates, segment, step) for segment in work.segments])


def _around_chain(work: NodeWork, card: Accelerator, step: StepSize, head_there: bool) -> float:
    """Return the seconds that a chain takes besides its blocks: its start, the copies of hidden states, and the head.

    The head counts only if its table is on the card (`head_there`). The hidden states and the logits of each sequence
    then cross the link, too.
    """
    link = card.link
    around = card.rates.start + step.tokens * work.crossing * (1 / link.up + 1 / link.down) + 2 * link.latency
    if not head_there:
        return around
    head, rows = work.head, step.sequences
    logits = VALUE * head.weights / max(1, work.crossing // VALUE)  # bytes: the vocabulary is weights / hidden size
    crossing = rows * (work.crossing / link.up + logits / link.down) + 2 * link.latency
    return around + card.rates.start + card.rates.seconds(head.nbytes, 2.0 * head.weights * rows) + crossing


def _dealt(cards: Cards, card: int, count: int) -> Mask:
    found: Mask = np.array(cards or (0,) * count).reshape(-1, 1) == card
    return found


def _computing(rates: Rates, segment: SegmentWork, step: StepSize) -> float:
    """Return the seconds that a device with `rates` takes for a segment's products with weights and its attention.

    Both read their operands once.
    """
    products = rates.seconds(segment.touched(step.tokens), 2.0 * segment.passed * step.tokens)
    window = segment.window or step.context
    kept = step.sequences * min(step.context, window) * segment.kv_token
    return products + rates.seconds(kept, step.tokens * min(step.attended, window) * segment.pair)


def _column(values: Sequence[float]) -> F64:
    return np.array(values, np.float64).reshape(-1, 1)

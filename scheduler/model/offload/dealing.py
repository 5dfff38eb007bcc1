"""The ways to divide a node's segments among its accelerators, each of which has its own memory and link.

PIPO's appendix D names two ways; in this model they differ only in the places of weights. In tensor parallelism every
accelerator has a part of each layer, so all links work on one layer. In pipeline parallelism each layer belongs to one
accelerator, and accelerators take turns, so one layer is loaded while another is computed. Each accelerator's part is
proportional to one of its figures. Data parallelism, a copy of every layer on each accelerator, is not compared: it
would keep the links busy for longest.

The *deficit* of an accelerator is its share of the bytes dealt so far, less the bytes that it has got.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from scheduler.model.machine import Accelerator
from scheduler.model.offload.problem import Problem
from scheduler.model.offload.work import Cards, NodeWork

_FIGURES: tuple[Callable[[Accelerator], float], ...] = (
    lambda card: card.memory,
    lambda card: card.link.up,
    lambda card: card.rates.read,
    lambda card: card.rates.operations,
)


def to_be_dealt(problem: Problem) -> bool:
    """Return True if there are several accelerators and the segments have not been divided among them."""
    return len(problem.machine.cards) > 1 and not problem.cards


def dealt_problems(problem: Problem) -> list[Problem]:
    """Return copies of the problem, one for each way to divide its segments among the accelerators."""
    ways = (deal(problem.work, shares) for shares in _shares(problem.machine.cards) for deal in (by_parts, by_layers))
    return [replace(problem, cards=cards) for cards in dict.fromkeys(ways)]


def by_parts(work: NodeWork, shares: Sequence[float]) -> Cards:
    """Return each segment's accelerator, with the segments of every block divided among the accelerators.

    `shares` is each accelerator's share of all bytes. An accelerator gets neighbouring segments of a block. A block
    that is one segment goes to the accelerator with the largest deficit.
    """
    found: list[int] = []
    behind = [0.0] * len(shares)
    for numbers in work.blocks:
        sizes = [work.segments[number].nbytes for number in numbers]
        behind = [due + share * sum(sizes) for due, share in zip(behind, shares, strict=True)]
        for size in sizes:
            card = _most_in_deficit(behind, found[-1] if len(found) > numbers.start else None, size)
            behind[card] -= size
            found.append(card)
    return tuple(found)


def by_layers(work: NodeWork, shares: Sequence[float]) -> Cards:
    """Return each segment's accelerator; each whole layer goes to the accelerator with the largest deficit.

    A layer begins with its attention.
    """
    found: list[int] = []
    behind, card, feeding = [0.0] * len(shares), max(range(len(shares)), key=shares.__getitem__), True
    for segment in work.segments:
        if segment.kind == "attention" and feeding:
            due = [left + share * segment.nbytes for left, share in zip(behind, shares, strict=True)]
            card = _most_in_deficit(due, None, 0)
        feeding = segment.kind != "attention"
        behind = [due + share * segment.nbytes for due, share in zip(behind, shares, strict=True)]
        behind[card] -= segment.nbytes
        found.append(card)
    return tuple(found)


def _most_in_deficit(behind: Sequence[float], last: int | None, size: int) -> int:
    """Return the accelerator that gets the next segment, of `size` bytes.

    The accelerator of the segment before is `last`. It gets the segment if its deficit is at least half the segment;
    otherwise the accelerator with the largest deficit gets it. `behind` is the deficit of each accelerator in bytes.
    """
    if last is not None and behind[last] >= size / 2:
        return last
    return max(range(len(behind)), key=lambda card: behind[card])


def _shares(cards: Sequence[Accelerator]) -> Iterator[list[float]]:
    """Yield lists of the accelerators' shares: proportional to each figure of an accelerator, and all on one
    accelerator.
    """
    for figure in _FIGURES:
        if total := sum(figure(card) for card in cards):  # 0 if no accelerator has memory left
            yield [figure(card) / total for card in cards]
    for only in range(len(cards)):
        yield [float(card == only) for card in range(len(cards))]

"""How a node's segments may be dealt to its accelerators, each of which has a memory and a link of its own.

PIPO's appendix D names two ways, and here they differ in nothing but what is loaded where: every accelerator has a part
of each layer (tensor parallelism), so that all links work on one layer; or a layer is one accelerator's (pipeline
parallelism), and layers take turns, so that one is loaded while another is computed. How large each one's part is,
follows one of its figures. A copy of every layer on each (data parallelism) would keep the links busy for longest.
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
    """Whether there are several accelerators, and nobody has said what is whose."""
    return len(problem.machine.cards) > 1 and not problem.cards


def dealt_problems(problem: Problem) -> list[Problem]:
    """The problem dealt in every way that is compared."""
    ways = (deal(problem.work, shares) for shares in _shares(problem.machine.cards) for deal in (by_parts, by_layers))
    return [replace(problem, cards=cards) for cards in dict.fromkeys(ways)]


def by_parts(work: NodeWork, shares: Sequence[float]) -> Cards:
    """Every block cut at its segments, neighbours together; what is one segment goes to whoever is most behind."""
    found: list[int] = []
    behind = [0.0] * len(shares)
    for numbers in work.blocks:
        sizes = [work.segments[number].nbytes for number in numbers]
        behind = [due + share * sum(sizes) for due, share in zip(behind, shares, strict=True)]
        for size in sizes:
            card = _most_behind(behind, found[-1] if len(found) > numbers.start else None, size)
            behind[card] -= size
            found.append(card)
    return tuple(found)


def by_layers(work: NodeWork, shares: Sequence[float]) -> Cards:
    """Whole layers to whoever is most behind; a layer begins with its attention."""
    found: list[int] = []
    behind, card, feeding = [0.0] * len(shares), max(range(len(shares)), key=shares.__getitem__), True
    for segment in work.segments:
        if segment.kind == "attention" and feeding:
            due = [left + share * segment.nbytes for left, share in zip(behind, shares, strict=True)]
            card = _most_behind(due, None, 0)
        feeding = segment.kind != "attention"
        behind = [due + share * segment.nbytes for due, share in zip(behind, shares, strict=True)]
        behind[card] -= segment.nbytes
        found.append(card)
    return tuple(found)


def _most_behind(behind: Sequence[float], last: int | None, size: int) -> int:
    """Who has the next segment: the `last`, as long as half of it is due to that; else whom most is due to."""
    if last is not None and behind[last] >= size / 2:
        return last
    return max(range(len(behind)), key=lambda card: behind[card])


def _shares(cards: Sequence[Accelerator]) -> Iterator[list[float]]:
    """Parts of the whole: as each figure of theirs, and all to one."""
    for figure in _FIGURES:
        if total := sum(figure(card) for card in cards):  # memory may be used up
            yield [figure(card) / total for card in cards]
    for only in range(len(cards)):
        yield [float(card == only) for card in range(len(cards))]

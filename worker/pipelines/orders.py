"""Orders of a step's tasks for batches in micro-batches (MoE-Lightning, figure 6), by what each block is.

See `worker.node.order`: an order keeps each micro-batch's own. A layer is an attention block with those that follow it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from worker.node.order import Phase, Task

AHEAD = 2  # micro-batches that are attended with before the one that goes on (algorithm 1)
_BEFORE = (Phase.PREPARE, Phase.SELECT, Phase.PROJECT, Phase.ATTEND)
Place = tuple[range, int]  # the blocks of a layer, and a micro-batch


@dataclass(frozen=True)
class Interleaved:
    """CGOPipe (algorithm 1): the accelerator goes on with one micro-batch while the host attends with the next two.

    `attends` says of each block whether it is attention. `ahead` of 0 is the order without overlap (figure 6, S3): each
    micro-batch waits for its own attention. With `behind` of 1, for nodes that sum, neurons come a turn later, so that
    a sum travels while the accelerator computes with other micro-batches: where there are enough of them.
    """

    attends: tuple[bool, ...]
    ahead: int = AHEAD
    behind: int = 0

    def __call__(self, blocks: int, micro_batches: int) -> Iterator[Task]:
        """See `worker.node.order.Order`."""
        places = [(layer, part) for layer in layers(self.attends) for part in range(micro_batches)]
        if self.behind and self.ahead and micro_batches > self.ahead + self.behind + 1:
            return self._staggered(places)
        return self._in_turn(places, micro_batches)

    def _in_turn(self, places: list[Place], micro_batches: int) -> Iterator[Task]:
        ahead = min(self.ahead, micro_batches)
        for place in places[:ahead]:
            yield from _before(place)
        for at, place in enumerate(places):
            if not ahead:
                yield from _before(place)
            later = places[at + ahead : at + ahead + 1] if ahead else []
            early = ahead < micro_batches  # what comes later does not wait for this one's neurons
            yield from _outputs(place)
            if early:
                yield from (task for each in later for task in _before(each))
            yield from _others(place)
            if not early:
                yield from (task for each in later for task in _before(each))

    def _staggered(self, places: list[Place]) -> Iterator[Task]:
        """A turn: output, the next heads, the neurons of the turn before, and the sums of what is over by then."""
        computed = list[Place]()  # whose last sum is not begun
        for place in places[: self.ahead]:
            yield from _before(place)
        for at, place in enumerate(places):
            yield from _outputs(place)
            yield from (task for later in places[at + self.ahead : at + self.ahead + 1] for task in _before(later))
            yield from (task for last in computed for task in _last_sum(last))
            computed = places[max(0, at - 1) : at]
            yield from (task for last in computed for task in _neurons(last))
            yield Task(place[1], place[0][0], Phase.SUM)
        yield from (task for last in computed for task in _last_sum(last))
        yield from _neurons(places[-1])
        yield from _last_sum(places[-1])


@dataclass(frozen=True)
class Layerwise:
    """Layer by layer, and in a layer micro-batch by micro-batch (figure 6, S4).

    While one computes, the accelerator loads the keys and values of the next.
    """

    attends: tuple[bool, ...]

    def __call__(self, blocks: int, micro_batches: int) -> Iterator[Task]:
        """See `worker.node.order.Order`."""
        for layer in layers(self.attends):
            for part in range(micro_batches):
                for block in layer:
                    yield from (Task(part, block, phase) for phase in Phase)


def layers(attends: Sequence[bool]) -> list[range]:
    """The blocks of each layer."""
    starts = [at for at, attention in enumerate(attends) if attention or not at]
    return [range(first, last) for first, last in zip(starts, [*starts[1:], len(attends)], strict=True)]


def _before(place: Place) -> Iterator[Task]:
    layer, part = place
    return (Task(part, layer[0], phase) for phase in _BEFORE)


def _outputs(place: Place) -> Iterator[Task]:
    """What comes after attention in its own block, but for the sum where others may come first."""
    layer, part = place
    yield Task(part, layer[0], Phase.OUTPUT)


def _others(place: Place) -> Iterator[Task]:
    """Its sum, and the blocks behind it."""
    layer, part = place
    yield Task(part, layer[0], Phase.SUM)
    yield from _neurons(place)
    yield from _last_sum(place)


def _neurons(place: Place) -> Iterator[Task]:
    """The blocks behind attention, but for the last sum."""
    (_, *others), part = place
    for block in others:
        yield from (Task(part, block, phase) for phase in Phase if phase is not Phase.SUM or block != others[-1])


def _last_sum(place: Place) -> Iterator[Task]:
    (_, *others), part = place
    yield from (Task(part, block, Phase.SUM) for block in others[-1:])

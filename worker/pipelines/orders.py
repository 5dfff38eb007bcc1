"""Orders of a step's tasks for batches in micro-batches (MoE-Lightning, figure 6).

An order keeps the tasks of each micro-batch in sequence, as `worker.node.order` requires. A layer here is an attention
block with the blocks that follow it, up to the next attention block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from worker.node.order import Phase, Task

AHEAD = 2  # micro-batches whose attention runs ahead of the one that the accelerator computes (algorithm 1)
_BEFORE = (Phase.PREPARE, Phase.SELECT, Phase.PROJECT, Phase.ATTEND)
Place = tuple[range, int]  # the numbers of a layer's blocks, and the number of a micro-batch


@dataclass(frozen=True)
class Interleaved:
    """MoE-Lightning's CGOPipe (algorithm 1).

    The accelerator computes one micro-batch while the host attends for the next two.

    Attributes:
        attends: whether each block is attention.
        ahead: the number of micro-batches whose attention runs ahead. With 0 there is no overlap (figure 6, S3): each
            micro-batch waits for its own attention.
        behind: 1 in a group of several nodes, else 0. With 1 and enough micro-batches, the neurons of a micro-batch are
            computed after the attention of the next. A sum then goes over the network while the accelerator computes
            other micro-batches.
    """

    attends: tuple[bool, ...]
    ahead: int = AHEAD
    behind: int = 0

    def __call__(self, blocks: int, micro_batches: int) -> Iterator[Task]:
        """Return the tasks of a step with `blocks` blocks and `micro_batches` micro-batches, in order."""
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
            early = ahead < micro_batches  # the later attention does not need the neurons of this place
            yield from _outputs(place)
            if early:
                yield from (task for each in later for task in _before(each))
            yield from _others(place)
            if not early:
                yield from (task for each in later for task in _before(each))

    def _staggered(self, places: list[Place]) -> Iterator[Task]:
        """Yield the tasks of a node in a group of several nodes.

        A place is one layer of one micro-batch. In the turn of a place, the node computes the output of its attention
        block, then the attention of a later place, then the neurons of the place before. So the sum after a place's
        attention can go over the network until the next turn, which computes that place's neurons.
        """
        computed = list[Place]()  # places whose neurons are computed, but whose last sum is not started
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

    While the accelerator computes one micro-batch, it loads the keys and values of the next. `attends` has one item per
    block, True for attention.
    """

    attends: tuple[bool, ...]

    def __call__(self, blocks: int, micro_batches: int) -> Iterator[Task]:
        """Yield the tasks of a step with `blocks` blocks and `micro_batches` micro-batches, in order."""
        for layer in layers(self.attends):
            for part in range(micro_batches):
                for block in layer:
                    yield from (Task(part, block, phase) for phase in Phase)


def layers(attends: Sequence[bool]) -> list[range]:
    """Return the range of block numbers of each layer; `attends` has one item per block, True for attention."""
    starts = [at for at, attention in enumerate(attends) if attention or not at]
    return [range(first, last) for first, last in zip(starts, [*starts[1:], len(attends)], strict=True)]


def _before(place: Place) -> Iterator[Task]:
    layer, part = place
    return (Task(part, layer[0], phase) for phase in _BEFORE)


def _outputs(place: Place) -> Iterator[Task]:
    layer, part = place
    yield Task(part, layer[0], Phase.OUTPUT)


def _others(place: Place) -> Iterator[Task]:
    layer, part = place
    yield Task(part, layer[0], Phase.SUM)
    yield from _neurons(place)
    yield from _last_sum(place)


def _neurons(place: Place) -> Iterator[Task]:
    """Yield the tasks of the blocks that follow attention in a place's layer, without the sum of the last block."""
    (_, *others), part = place
    for block in others:
        yield from (Task(part, block, phase) for phase in Phase if phase is not Phase.SUM or block != others[-1])


def _last_sum(place: Place) -> Iterator[Task]:
    (_, *others), part = place
    yield from (Task(part, block, Phase.SUM) for block in others[-1:])

"""The orders of a batch: each keeps the order of every micro-batch, and CGOPipe attends two micro-batches ahead."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.node.order import Order, Phase, Task
from worker.pipelines.orders import AHEAD, Interleaved, Layerwise, layers

halves = st.lists(st.booleans(), min_size=1, max_size=9).map(tuple)


@given(halves, st.integers(1, 8), st.sampled_from([Interleaved, Layerwise]), st.integers(0, 3), st.integers(0, 1))
def test_every_task_comes_once_and_behind_its_own(
    attends: tuple[bool, ...], micro_batches: int, kind: type[Interleaved] | type[Layerwise], ahead: int, behind: int
) -> None:
    order: Order = Interleaved(attends, ahead, behind) if kind is Interleaved else Layerwise(attends)
    tasks = list(order(len(attends), micro_batches))
    for part in range(micro_batches):
        own = [(task.block, task.phase) for task in tasks if task.micro_batch == part]
        assert own == [(block, phase) for block in range(len(attends)) for phase in Phase]


@pytest.mark.parametrize("micro_batches", [3, 4, 7])
def test_the_host_attends_two_micro_batches_ahead(micro_batches: int) -> None:
    """Algorithm 1, lines 8 to 17, across layers too, so that the host never lacks work."""
    attends = (True, False) * 3
    tasks = list(Interleaved(attends)(len(attends), micro_batches))
    places = [(layer[0], part) for layer in layers(attends) for part in range(micro_batches)]
    for at, (block, part) in enumerate(places):
        outputs = tasks.index(Task(part, block, Phase.OUTPUT))
        begun = [place for place in places if tasks.index(Task(place[1], place[0], Phase.ATTEND)) < outputs]
        assert begun == places[: at + AHEAD]


@pytest.mark.parametrize("micro_batches", [5, 8])
def test_where_nodes_sum_neurons_are_a_turn_behind(micro_batches: int) -> None:
    """While a micro-batch's sum of attention is sent, the accelerator computes another micro-batch's neurons."""
    attends = (True, False) * 2
    tasks = list(Interleaved(attends, behind=1)(len(attends), micro_batches))
    places = [(layer[0], part) for layer in layers(attends) for part in range(micro_batches)]
    for (block, part), (later, other) in pairwise(places):
        sums = tasks.index(Task(part, block, Phase.SUM))
        neurons = tasks.index(Task(part, block + 1, Phase.OUTPUT))
        assert sums < tasks.index(Task(other, later, Phase.OUTPUT)) < neurons
        assert neurons < tasks.index(Task(other, later, Phase.SUM))
    few = Interleaved(attends, behind=1)(len(attends), 4)
    assert list(few) == list(Interleaved(attends)(len(attends), 4))


def test_without_lookahead_a_micro_batch_waits_for_its_attention() -> None:
    tasks = list(Interleaved((True, False), ahead=0)(2, 3))
    assert tasks == [Task(part, block, phase) for part in range(3) for block in range(2) for phase in Phase]


def test_layers_begin_with_attention() -> None:
    assert layers((True, False, False, True, False)) == [range(3), range(3, 5)]
    assert layers((False, True)) == [range(1), range(1, 2)]

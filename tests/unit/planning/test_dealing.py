"""Several accelerators: how segments are dealt, what that costs, and that the choice is never the slowest."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.model.machine import Accelerator, NodeMachine
from scheduler.model.offload.choice import choose
from scheduler.model.offload.dealing import by_layers, by_parts, dealt_problems
from scheduler.model.offload.fitting import feasible, refusal
from scheduler.model.offload.forecast import deepened, forecast
from scheduler.model.offload.memory import Needs, peaks
from scheduler.model.offload.problem import Limits, Problem
from scheduler.model.offload.work import Workload
from tests.support.devices.offload_cases import MACHINE, layers

REQUEST = Workload(prompt=8, answer=4, sequences=1, context=32)
FREE = Limits()
STREAMED = Limits(weights="ram", kv="gpu", pipeline="performance", prompt="accelerator", decode="accelerator")


def card(memory: int = 10_000_000, up: float = 200.0, read: float = 1000.0) -> Accelerator:
    assert MACHINE.accelerator is not None
    found = MACHINE.accelerator
    return replace(found, memory=memory, link=replace(found.link, up=up), rates=replace(found.rates, read=read))


def machine(*cards: Accelerator) -> NodeMachine:
    return replace(MACHINE, accelerator=cards[0], more=cards[1:])


def problem(there: NodeMachine, limits: Limits = FREE, count: int = 4, parts: int = 3) -> Problem:
    return Problem(layers(count, 8, parts), there, REQUEST, Needs(token=1), limits)


@given(st.integers(1, 6), st.integers(1, 4), st.lists(st.integers(0, 5), min_size=2, max_size=3).filter(any))
def test_every_device_has_about_its_due(count: int, parts: int, weights: list[int]) -> None:
    """To within a layer if layers are whole, to within a block if blocks are cut."""
    work, shares = layers(count, 8, parts), [weight / sum(weights) for weight in weights]
    for deal, off in ((by_parts, 300), (by_layers, 400)):
        cards = deal(work, shares)
        assert len(cards) == len(work.segments)
        for number, share in enumerate(shares):
            mine = sum(segment.nbytes for segment, card in zip(work.segments, cards, strict=True) if card == number)
            assert abs(mine - share * work.nbytes) <= off
            if not share:
                assert not mine


def test_neighbours_of_a_block_stay_together() -> None:
    cards = by_parts(layers(2, 8, 4), [0.5, 0.5])
    for first in (1, 6):
        ffn = list(cards[first : first + 4])
        assert ffn in (sorted(ffn), sorted(ffn, reverse=True))


def test_two_links_stream_about_twice_as_fast() -> None:
    asked = [problem(there, STREAMED) for there in (machine(card()), machine(card(), card()))]
    one, two = (forecast(each, deepened(each, choose(each).offload)) for each in asked)
    assert one.decode.seconds / two.decode.seconds == pytest.approx(2, rel=0.1)
    assert {"up", "up 2", "accelerator 2"} <= two.decode.use.keys()


def test_a_slow_link_gets_little() -> None:
    found = choose(problem(machine(card(up=300.0), card(up=30.0)), STREAMED, count=8)).offload
    assert 0 < sum(found.cards) <= len(found.cards) / 4


@settings(deadline=None, max_examples=6)
@given(st.tuples(*[st.integers(200, 3000)] * 2), st.tuples(*[st.sampled_from([50.0, 200.0, 1000.0])] * 2))
def test_what_was_chosen_fits_each_card_and_no_dealing_beats_it(
    sizes: tuple[int, int], speeds: tuple[float, float]
) -> None:
    asked = problem(machine(*(card(size, speed) for size, speed in zip(sizes, speeds, strict=True))), count=2)
    found = choose(asked)
    taken = peaks(asked.work, found.offload, asked.request, asked.needs, asked.chunk).cards
    for parts, limit in zip(taken, sizes, strict=False):
        assert parts.total <= limit
    for dealt in dealt_problems(asked):
        if feasible(dealt):
            assert found.seconds <= choose(dealt).seconds


def test_a_card_more_never_makes_it_slower() -> None:
    for second in (card(100), card(2000, up=10.0), card(2000, read=10.0)):
        alone, beside = choose(problem(machine(card(1500)))), choose(problem(machine(card(1500), second)))
        assert beside.seconds <= alone.seconds * 1.0001


def test_a_refusal_names_both_memories_and_what_would_do() -> None:
    asked = problem(machine(card(200), card(0)), Limits(weights="gpu"))
    assert "GPU memory of 0KiB and 0KiB is too little" in refusal(asked)


def test_a_node_without_heads_has_a_plan() -> None:
    work = layers(3, 8, 2)
    without = [
        replace(part, nbytes=0, weights=0, kv_token=0, pair=0) if part.kv_token else part for part in work.segments
    ]
    assert without != list(work.segments)
    there = machine(card(memory=2000))
    asked = Problem(replace(work, segments=tuple(without)), there, REQUEST, Needs(token=1), FREE)
    assert 0 < forecast(asked, choose(asked).offload).decode.seconds < 1e6

"""Places, pages and steps are shared fairly: between clients, and between HTTP requests of one client."""

from array import array
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from master.deployment.pages import PagePool
from master.generation.admission import Admission
from master.generation.batcher import Batcher
from master.generation.client import Client
from master.generation.fairness import SLICE_S
from master.generation.request import Request
from master.generation.sequence import Sequence
from master.vocabulary.sampler import Sampler, Sampling

PAGE = 32
PLACES = 16


class House:
    """An admission with a pool of pages, without a model."""

    def __init__(self, pages: int = 64) -> None:
        self.admission, self.numbers = Admission(PLACES), 0
        self.pages = PagePool(pages)
        deployment: Any = SimpleNamespace(pages=self.pages, limits=SimpleNamespace(chunk=512, pages=pages))
        self.admission.deploy(deployment)

    def ask(self, client: str, count: int = 1, prompt: int = 8, limit: int = 4000) -> list[Request]:
        """Add one HTTP request for a number of answers."""
        sender, made = Client(client), []
        for _ in range(count):
            self.numbers += 1
            sequence = Sequence(self.numbers, array("i", range(3, 3 + prompt)), client=sender)
            made.append(Request(sequence, Sampler(Sampling(temperature=0)), limit, lambda sampled: True))
            self.admission.waiting.push(made[-1])
        return made

    def running(self) -> Counter[str]:
        """Return the number of running requests of each client."""
        return Counter(each.client.name for each in self.admission.running)

    def step(self, now: float, tokens: int = 1) -> None:
        """Admit requests, and grow each running request by a number of tokens."""
        self.admission.admit(now)
        for each in self.admission.running:
            each.sequence.tokens.extend([5] * tokens)
            each.made += tokens
        self.admission.make_room()
        for each in self.admission.running:
            self.pages.append(each.sequence.table, len(each.sequence.tokens))


@pytest.mark.parametrize("other", ["a", "b"])
def test_many_answers_do_not_keep_a_short_request_waiting(other: str) -> None:
    """The short request is of another client, or (behind a proxy, or on one machine) of the same address."""
    house = House()
    for _ in range(4):
        house.ask("a", 16)
    for step in range(100):
        house.step(float(step))
    (short,) = house.ask(other, limit=2)
    house.step(101.0)
    assert short in house.admission.running


def test_places_become_even_and_stay_so() -> None:
    house = House(pages=1000)
    for client in "abc":
        house.ask(client, 40)
        house.step(1.0)
    counts = house.running()
    assert sum(counts.values()) == PLACES
    assert max(counts.values()) - min(counts.values()) <= 1
    preempted = house.admission.preempted
    for step in range(50):
        house.step(2.0 + step)
    assert house.admission.preempted == preempted
    assert house.running() == counts


def test_the_client_with_most_pages_gives_some_back() -> None:
    house = House(pages=24)
    long = house.ask("a", prompt=20 * PAGE)
    house.step(1.0)
    (short,) = house.ask("b")
    for step in range(400):
        house.step(2.0 + step)
        assert short in house.admission.running
    assert long[0] not in house.admission.running
    house.admission.withdraw(short)
    house.admission.give_back(short.sequence)
    house.step(500.0)
    assert long[0] in house.admission.running


def test_a_request_that_holds_nearly_all_yields_after_its_slice() -> None:
    house = House(pages=12)
    (whole,) = house.ask("a", prompt=12 * PAGE - 2, limit=1)
    house.step(0.0, tokens=0)
    (short,) = house.ask("b")
    house.step(SLICE_S / 2, tokens=0)
    assert house.admission.running == [whole]
    house.step(SLICE_S, tokens=0)
    assert house.admission.running == [short]
    for step in range(3):  # which cannot keep it away for long
        house.ask("b")
        house.step(SLICE_S * (3 + step), tokens=0)
        if step == 0:
            house.admission.withdraw(short)
            house.admission.give_back(short.sequence)
    house.admission.running.clear()
    assert next(house.admission.waiting.heads()) is whole


def test_equal_requests_do_not_preempt_each_other() -> None:
    house = House(pages=10)
    for client in "abcd":
        house.ask(client, prompt=9 * PAGE)
    for step in range(100):
        house.step(float(step), tokens=0)
    assert house.admission.preempted == 0
    assert sum(house.running().values()) == 1


def sequences(client: str, count: int, pending: int) -> list[Sequence]:
    made = [Sequence(1000 * ord(client) + number, [1] * 40, client=Client(client)) for number in range(count)]
    for each in made:
        each.computed = each.sent = len(each.tokens) - pending
    return made


def test_a_shared_step_has_few_answers_of_one_client() -> None:
    batcher = Batcher(PagePool(1000), 512)
    many, one = sequences("a", 20, 1), sequences("b", 1, 1)
    seen = Counter[int]()
    for _ in range(5):
        work = batcher.pick([*many, *one])
        assert any(item.sequence is one[0] for item in work)
        assert len(work) == 9
        seen.update(item.sequence.id for item in work if item.sequence is not one[0])
    assert len(seen) == 20  # in turn: none waits for more than two steps
    assert len(batcher.pick(many)) == 20


def test_prompts_share_a_step_by_client() -> None:
    batcher = Batcher(PagePool(10_000), 64)
    many, one = sequences("a", 30, 40), sequences("b", 1, 30)
    counts = {item.sequence.id: item.count for item in batcher.pick([*many, *one])}
    assert counts[one[0].id] == 30
    assert sum(counts.values()) <= 64

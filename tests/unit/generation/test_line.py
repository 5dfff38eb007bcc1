"""Who is next: clients take turns, each in its own order; who had to give way comes before all."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from master.generation.line import WaitingLine
from master.generation.request import Request
from master.generation.sampler import Sampler, Sampling
from master.generation.sequence import Sequence


def request(client: str, number: int) -> Request:
    return Request(Sequence(number, [1]), Sampler(Sampling()), 1, lambda sampled: True, client=client)


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_a_client_with_many_requests_waits_behind_every_other_one_between_two(clients: list[str]) -> None:
    line = WaitingLine()
    for number, client in enumerate(clients):
        line.push(request(client, number))
    assert len(line) == len(clients) == len(list(line))
    left = {client: clients.count(client) for client in clients}
    taken: list[Request] = []
    while line:
        head = line.head()
        taken.append(line.pop())
        assert taken[-1] is head
    for client in left:
        own = [index for index, each in enumerate(taken) if each.client == client]
        assert [taken[index].sequence.id for index in own] == [n for n, each in enumerate(clients) if each == client]
        for before, after in pairwise(own):
            between = [each.client for each in taken[before + 1 : after]]
            assert len(between) == len(set(between)), "nobody has two turns between two of mine"


def test_who_gave_way_is_first_and_anybody_can_leave() -> None:
    line = WaitingLine()
    first, second, third = request("a", 1), request("b", 2), request("a", 3)
    line.push(first)
    line.push(second)
    line.push_back(third)
    assert line.head() is third
    assert line.remove(first)
    assert not line.remove(first)
    assert [each.sequence.id for each in line] == [3, 2]
    assert line.remove(third)
    assert line.pop() is second
    assert line.head() is None

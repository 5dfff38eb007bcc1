"""The order of requests: clients take turns, and a preempted request is the next of its client."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from master.generation.client import Client
from master.generation.line import WaitingQueue
from master.generation.request import Request
from master.generation.sequence import Sequence
from master.vocabulary.sampler import Sampler, Sampling


def request(client: str | Client, number: int) -> Request:
    sender = Client(client) if isinstance(client, str) else client
    return Request(Sequence(number, [1], client=sender), Sampler(Sampling()), 1, lambda sampled: True)


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_a_client_with_many_requests_alternates_with_others(clients: list[str]) -> None:
    line = WaitingQueue()
    for number, client in enumerate(clients):
        line.push(request(client, number))
    assert len(line) == len(clients) == len(list(line))
    left = {client: clients.count(client) for client in clients}
    taken: list[Request] = []
    while line:
        taken.append(next(line.heads()))
        line.pop(taken[-1])
    for client in left:
        own = [index for index, each in enumerate(taken) if each.client.name == client]
        assert [taken[index].sequence.id for index in own] == [n for n, each in enumerate(clients) if each == client]
        for before, after in pairwise(own):
            between = [each.client.name for each in taken[before + 1 : after]]
            assert len(between) == len(set(between)), "nobody has two turns between two of mine"


def order(line: WaitingQueue) -> list[int]:
    """Remove all requests, and return them in order."""
    found = []
    while line:
        head = next(line.heads())
        line.pop(head)
        found.append(head.sequence.id)
    return found


def test_preempted_requests_are_first_in_their_own_line_alone() -> None:
    line = WaitingQueue()
    for number, client in enumerate("ab" * 2):
        line.push(request(client, number))
    for number in range(10, 13):
        line.push_back(request("b", number))
    assert order(line) == [0, 12, 2, 11, 10, 1, 3]


def test_answers_to_one_http_request_take_turns_with_the_next() -> None:
    line, many = WaitingQueue(), Client("a")
    for number in range(3):
        line.push(request(many, number))
    line.push(request("a", 10))
    line.push(request("b", 20))
    assert [each.sequence.id for each in line.heads()] == [0, 20, 10]
    assert order(line) == [0, 20, 10, 1, 2]


def test_any_request_can_leave() -> None:
    line = WaitingQueue()
    first, second, third = request("a", 1), request("b", 2), request("a", 3)
    for each in (first, second, third):
        line.push(each)
    assert line.remove(first)
    assert not line.remove(first)
    assert line.sizes == {"b": 1, "a": 1}
    assert order(line) == [3, 2]
    assert not line.remove(second)


def test_a_request_that_is_held_up_holds_no_other_up() -> None:
    line = WaitingQueue()
    first = request("a", 1)
    second = request("a", 2)
    second.follows = first
    line.push(second)
    line.push(request("b", 3))
    assert [each.sequence.id for each in line.heads()] == [3]
    first.finished = True
    assert [each.sequence.id for each in line.heads()] == [2, 3]

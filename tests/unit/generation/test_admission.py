"""Admission: as many requests as have pages, plus one page for each request whose answer will need another."""

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from master.deployment.pages import PagePool
from master.generation.admission import Admission
from master.generation.request import Request, Sampled
from master.generation.sequence import Sequence
from master.vocabulary.sampler import Sampler, Sampling

POOL = 8  # pages of 32 tokens
Heard = Callable[[Sampled], bool]


def admission(count: int, prompt: int, limit: int) -> Admission:
    """Return an admission with a number of waiting requests and a pool of its own."""
    found = Admission(most=64)
    deployment: Any = SimpleNamespace(pages=PagePool(POOL), limits=SimpleNamespace(chunk=512, pages=POOL))
    found.deploy(deployment)
    heard: Heard = lambda sampled: True  # noqa: E731
    for number in range(count):
        sequence = Sequence(number, array("i", range(3, 3 + prompt)))
        found.waiting.push(Request(sequence, Sampler(Sampling(temperature=0)), limit, heard))
    return found


@pytest.mark.parametrize(
    ("prompt", "limit", "running"),
    [
        (8, 24, POOL),  # all of it is one page, and the others grow no more
        (8, 25, POOL),  # the last token is not computed with
        (8, 26, POOL // 2),  # each of the others may take a page
        (32, 1, POOL),
        (32, 2, POOL // 2),
        (64, 1, POOL // 2),
        (64, 40, 3),  # two pages each, and one more to come for each
    ],
)
def test_as_many_run_as_there_are_pages_for(prompt: int, limit: int, running: int) -> None:
    found = admission(POOL, prompt, limit)
    found.admit(1.0)
    assert len(found.running) == running


def test_what_has_been_made_counts() -> None:
    """Seven answers that lack one token need no more pages."""
    found = admission(POOL, 8, 40)
    found.admit(1.0)
    assert len(found.running) == POOL // 2
    for request in found.running:
        request.made = 39
    found.admit(2.0)
    assert len(found.running) == POOL // 2 + 2

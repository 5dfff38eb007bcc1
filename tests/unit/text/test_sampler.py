"""Sampling: greedy, filters, seeds, penalties."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from master.generation.sampler import Sampler, Sampling
from tpi.errors import UsageError

LOGITS = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625], np.float32))


def drawn(sampling: Sampling, times: int = 200) -> set[int]:
    sampler = Sampler(sampling)
    return {sampler.sample(LOGITS) for _ in range(times)}


def test_temperature_zero_is_greedy() -> None:
    assert drawn(Sampling(temperature=0)) == {0}


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(temperature=1, top_k=2, top_p=1, min_p=0, seed=1), {0, 1}),
        (Sampling(temperature=1, top_k=0, top_p=0.6, min_p=0, seed=1), {0, 1}),
        (Sampling(temperature=1, top_k=0, top_p=1, min_p=0.2, seed=1), {0, 1, 2}),
        (Sampling(temperature=1, top_k=0, top_p=1, min_p=0, seed=1), {0, 1, 2, 3, 4}),
    ],
)
def test_filters_keep_exactly_the_allowed(sampling: Sampling, allowed: set[int]) -> None:
    assert drawn(sampling) == allowed


def test_frequencies_follow_the_probabilities() -> None:
    sampler = Sampler(Sampling(temperature=1, top_k=0, top_p=1, min_p=0, seed=3))
    counts = np.bincount([sampler.sample(LOGITS) for _ in range(4000)], minlength=5) / 4000
    assert np.abs(counts - np.exp(LOGITS)).max() < 0.03


@given(st.integers(0, 2**31))
def test_the_same_seed_draws_the_same(seed: int) -> None:
    first, second = (Sampler(Sampling(seed=seed)) for _ in range(2))
    assert [first.sample(LOGITS) for _ in range(5)] == [second.sample(LOGITS) for _ in range(5)]


def test_repeat_penalty_lowers_seen_tokens_whatever_their_sign() -> None:
    logits = np.array([2.0, 1.5, -1.0], np.float32)
    sampler = Sampler(Sampling(temperature=0, repeat_penalty=2.0))
    assert sampler.sample(logits, history=[0]) == 1
    assert logits[0] == 2.0  # not changed in place


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_p": 0}, {"min_p": 2}, {"repeat_penalty": 0}, {"top_k": -1}])
def test_out_of_range_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Sampling(**bad)  # type: ignore[arg-type]

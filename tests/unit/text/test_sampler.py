"""Sampling: greedy, filters, seeds, penalties."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from master.vocabulary.sampler import Sampler, Sampling
from tpi.errors import UsageError

LOGITS = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625], np.float32))


class Unforced:
    """A constraint that forces no token."""

    def forced(self) -> list[int]:
        return []

    def allowed(self, tokens: Sequence[int]) -> int:
        return len(tokens)


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


def test_penalties_count_the_answer_and_not_the_prompt() -> None:
    logits = np.array([2.0, 1.5, 1.2], np.float32)
    once = Sampler(Sampling(temperature=0, presence_penalty=1.0))
    often = Sampler(Sampling(temperature=0, frequency_penalty=0.3))
    assert once.sample(logits, [0, 0], prompt=2) == 0
    assert once.sample(logits, [0, 0, 0], prompt=2) == 1
    assert [often.sample(logits, [5, *[0] * count], prompt=1) for count in range(4)] == [0, 0, 1, 1]
    assert logits.tolist() == [2.0, 1.5, np.float32(1.2)]  # not changed in place


def test_a_bias_is_added_and_logprobs_are_the_models_own() -> None:
    sampler = Sampler(Sampling(temperature=0, bias={3: 100.0}))
    token, said = sampler.draw(LOGITS, [], 0, 2)
    assert token == 3
    assert said is not None
    assert said.drawn == pytest.approx(np.log(0.0625), abs=1e-6)
    assert [best for best, _ in said.best] == [0, 1]
    assert [value for _, value in said.best] == pytest.approx(np.log([0.5, 0.25]), abs=1e-6)
    assert sampler.draw(LOGITS, [], 0, 0)[1].best == ()  # type: ignore[union-attr]
    assert sampler.draw(LOGITS, [], 0, None)[1] is None


def test_a_constraint_decides_what_may_come_and_hears_what_came() -> None:
    class Odd(Unforced):
        def __init__(self) -> None:
            self.came: list[int] = []

        def allow(self, logits: np.ndarray) -> np.ndarray:
            return np.where(np.arange(logits.size) % 2 == 1, logits, np.float32(-np.inf))

        def accept(self, token: int) -> None:
            self.came.append(token)

    odd = Odd()
    sampler = Sampler(Sampling(temperature=1, top_k=0, top_p=1, min_p=0, seed=1), odd)
    drawn = [sampler.sample(LOGITS) for _ in range(50)]
    assert set(drawn) == {1, 3}
    assert odd.came == drawn


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("temperature", -1), ("temperature", 1e300), ("temperature", math.nan), ("top_p", 0), ("min_p", 2),
        ("repeat_penalty", 0), ("repeat_penalty", 1e-40), ("repeat_penalty", 1e40), ("top_k", -1),
        ("frequency_penalty", 1e39), ("presence_penalty", math.nan), ("bias", {3: math.inf}), ("seed", 1 << 64),
    ],
)  # fmt: skip
def test_out_of_range_is_refused_with_the_range(name: str, bad: Any) -> None:
    with pytest.raises(UsageError, match=r"is out of range; give a number (from|above) "):
        Sampling(**{name: bad})


EDGES = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 5e-324, 1e-310, 1e-45, 1e-20, 1.0, 100.0]),
    top_k=st.sampled_from([0, 1, 3, 1 << 31]),
    top_p=st.sampled_from([5e-324, 1e-40, 0.5, 1.0]),
    min_p=st.sampled_from([0.0, 5e-324, 0.05, 1.0]),
    repeat_penalty=st.sampled_from([0.01, 1.0, 100.0]),
    frequency_penalty=st.sampled_from([-100.0, 0.0, 5e-324, 100.0]),
    presence_penalty=st.sampled_from([-100.0, 0.0, 100.0]),
    bias=st.dictionaries(st.integers(0, 4), st.sampled_from([-100.0, 5e-324, 100.0])),
    seed=st.sampled_from([None, -1, 0, (1 << 63) - 1]),
)


@given(EDGES, st.lists(st.sampled_from([-np.inf, -1e30, -1.0, 0.0, 1e-40, 1.0, 1e30]), min_size=4, max_size=4))
def test_any_setting_within_its_bounds_draws_a_token(sampling: Sampling, logits: list[float]) -> None:
    sampler, history = Sampler(sampling), [0, 1, 1, 4]
    token, said = sampler.draw(np.array([0.5, *logits], np.float32), history, 1, 3)
    assert 0 <= token < 5
    assert said is not None


def test_the_least_temperature_is_greedy() -> None:
    assert drawn(Sampling(temperature=5e-324, top_k=0, top_p=1, min_p=0)) == {0}


def test_a_grammar_that_leaves_no_token_is_not_the_models_fault() -> None:
    class Nothing(Unforced):
        def allow(self, logits: np.ndarray) -> np.ndarray:
            return np.full_like(logits, -np.inf)

        def accept(self, token: int) -> None:
            raise AssertionError(token)

    with pytest.raises(UsageError, match="the grammar allows no token here"):
        Sampler(Sampling(), Nothing()).sample(LOGITS)

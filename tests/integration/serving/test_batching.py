"""Many requests at once each give the tokens of the request alone, whichever requests join, leave or are preempted."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from master.generation.engine import Engine
from master.generation.request import Request, Sampled
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.cluster.inprocess import in_process_deployment, in_process_engine
from tests.support.generating import generate
from tests.support.models import VOCAB
from tpi.errors import PlanError
from tpi.pack.reader import Pack

GREEDY = Sampling(temperature=0)
TOKENS = 56


def prompts(seed: int) -> list[list[int]]:
    """Return eight prompts of 3 to 69 tokens, half of them with a common prefix."""
    random = np.random.default_rng(seed)
    stem = random.integers(3, VOCAB, 40).tolist()
    own = [random.integers(3, VOCAB, int(random.integers(3, 30))).tolist() for _ in range(8)]
    return [stem + one if number % 2 else one for number, one in enumerate(own)]


class Asked:
    """A greedy request, its tokens and its end."""

    def __init__(self, engine: Engine, prompt: list[int], reuse: bool) -> None:
        self.made: list[int] = []
        self.sequence = engine.admit(prompt, reuse)
        self.request = Request(self.sequence, Sampler(GREEDY), TOKENS, self._hear)
        engine.submit(self.request)

    def _hear(self, sampled: Sampled) -> bool:
        self.made.append(sampled.token)
        return True


def alone(pack: Pack, cache: Path, wanted: list[list[int]]) -> list[list[int]]:
    with in_process_engine(pack, [1], cache) as engine:
        made = []
        for prompt in wanted:
            sequence = engine.admit(prompt)
            made.append([sampled.token for sampled in generate(engine, sequence, Sampler(GREEDY), TOKENS)])
            engine.release(sequence)
        return made


@pytest.mark.parametrize("seed", range(4))
def test_eight_at_random_times_with_too_few_pages(seed: int, tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    pack, wanted, random = tiny_pack("llama"), prompts(seed), np.random.default_rng(seed)
    expected = alone(pack, tmp_path / "alone", wanted)
    with closing(in_process_deployment(pack, [1, 1], tmp_path / "many", pool=7)) as deployment:
        engine, asked, todo = Engine(deployment), list[Asked](), list(wanted)
        while todo or engine.requests:
            if todo and (random.random() < 0.7 or not engine.requests):
                asked.append(Asked(engine, todo.pop(0), reuse=bool(random.random() < 0.8)))
            engine.step()
            for one in asked:
                if one.request.finished:
                    engine.release(one.sequence)
        assert [one.made for one in asked] == expected
        assert engine.admission.preempted
        assert deployment.pages.free == 7


def test_prompts_that_begin_alike_are_computed_once(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    with in_process_engine(tiny_pack("llama"), [1, 1], tmp_path) as engine:
        stem = list(range(3, 90))
        first = Asked(engine, stem, reuse=True)
        second = Asked(engine, stem, reuse=True)
        second.request.follows = first.request
        while engine.requests:
            engine.step()
        assert first.made == second.made
        assert (first.sequence.cached, second.sequence.cached) == (0, 64)


def test_a_follower_of_a_withdrawn_request_goes_on_alone(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    with in_process_engine(tiny_pack("llama"), [1], tmp_path) as engine:
        first, second = (Asked(engine, [5, 6, 7], reuse=True) for _ in range(2))
        second.request.follows = first.request
        engine.withdraw(first.request)
        while engine.requests:
            engine.step()
        assert len(second.made) == TOKENS
        engine.step()  # nothing to do is no step


def test_a_long_prompt_does_not_stop_the_others(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    """In every step of the prompt's prefill, the other answer gets one more token."""
    with in_process_engine(tiny_pack("llama"), [1], tmp_path, chunk=16) as engine:
        first = Asked(engine, [5, 6, 7], reuse=False)
        engine.step()
        long = Asked(engine, list(range(3, 110)), reuse=False)
        while not long.made:
            before = len(first.made)
            engine.step()
            assert len(first.made) == before + 1 or first.request.finished


def test_hidden_states_beside_answers(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    tokens, rows = list(range(3, 60)), list[np.ndarray]()
    with in_process_engine(tiny_pack("llama"), [1, 1], tmp_path) as engine:
        answer = Asked(engine, [5, 6, 7], reuse=False)
        engine.step()
        sequence = engine.admit(tokens)
        engine.submit(Request(sequence, Sampler(GREEDY), 1, lambda sampled: True, rows=lambda x: rows.append(x.copy())))
        while engine.requests:
            engine.step()
        assert len(answer.made) == TOKENS
        logits = engine.deployment.vocabulary.head(np.concatenate(rows))
        engine.release(sequence)
        assert np.abs(logits - engine.logits(tokens)).max() < 1e-5


def test_a_pool_too_small_for_one_is_said(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    with closing(in_process_deployment(tiny_pack("llama"), [1], tmp_path, pool=2)) as deployment:
        engine = Engine(deployment)
        asked = Asked(engine, list(range(3, 80)), reuse=False)
        with pytest.raises(PlanError, match="do not fit in the KV cache"):
            engine.step()
        engine.withdraw(asked.request)

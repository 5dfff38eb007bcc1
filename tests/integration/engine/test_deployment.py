"""A deployment is replaced while requests run: they continue with the same tokens."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from master.generation.answer import AnswerLimits
from master.generation.engine import Engine
from master.generation.request import Request, Sampled
from master.options import RunOptions
from master.session import Session
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.generating import answer_in, generate
from tests.support.models import TinyModel
from tpi.pack.reader import Pack

PROMPTS = [[5, 6, 7, 8], list(range(40, 60)), [9] * 3]
LENGTH, CUT = 24, 9  # tokens of an answer, and after which the deployment is replaced


def submitted(engine: Engine, said: dict[int, list[int]]) -> list[Request]:
    """Submit a greedy request for each prompt; its tokens go to `said`, by the number of the prompt."""

    def request(number: int, prompt: list[int]) -> Request:
        def sink(sampled: Sampled) -> bool:
            said.setdefault(number, []).append(sampled.token)
            return True

        return Request(engine.admit(prompt), Sampler(Sampling(temperature=0)), LENGTH, sink)

    requests = [request(number, prompt) for number, prompt in enumerate(PROMPTS)]
    for one in requests:
        engine.submit(one)
    return requests


def finish(engine: Engine) -> None:
    while engine.requests:
        engine.step()


@pytest.mark.parametrize("others", [[1.0], [1, 2], [2, 1, 3], [0, 1]])
def test_requests_outlive_their_deployment(others: list[float], tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    pack, expected, said = tiny_pack("llama"), dict[int, list[int]](), dict[int, list[int]]()
    with closing(in_process_deployment(pack, [1, 1], tmp_path / "one")) as deployment:
        engine = Engine(deployment)
        submitted(engine, expected)
        finish(engine)
    with closing(in_process_deployment(pack, [1, 1], tmp_path / "one")) as first:
        engine = Engine(first)
        submitted(engine, said)
        while len(said.get(0, [])) < CUT:
            engine.step()
        sofar = {number: list(tokens) for number, tokens in said.items()}
    with closing(in_process_deployment(pack, others, tmp_path / "two", epoch=2)) as second:
        engine.replace(second)
        finish(engine)
        assert all(said[number][: len(tokens)] == tokens for number, tokens in sofar.items())
        assert said == expected
        assert second.pages.free + sum(len(s.table) for s in engine._sequences.values()) == second.pages.total


def test_a_session_deals_the_model_anew_while_it_answers(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    """With real workers, the new deployment has another epoch and other shares.

    The answer's second half stays the same.
    """
    with Session(RunOptions(str(tiny_model("llama").directory), cache=tmp_path, local=2)) as session:
        greedy, limits = Sampler(Sampling(temperature=0)), AnswerLimits(LENGTH, ignore_eos=True)
        expected = answer_in(session, PROMPTS[1], greedy, limits).token_ids
        made: list[int] = []
        sequence = session.engine.admit(PROMPTS[1])
        for sampled in generate(session.engine, sequence, greedy, LENGTH):
            made.append(sampled.token)
            if len(made) == CUT:
                before = session.engine.deployment.epoch
                session.deploy([1, 1, 4])
                assert session.engine.deployment.epoch == before + 1
        assert made == expected
        assert [node.neurons for node in session.figures.report()][2] != [0, 0]


def test_a_request_ends_at_its_limit_its_stops_or_its_sink(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    with closing(in_process_deployment(tiny_pack("llama"), [1], tmp_path)) as deployment:
        engine, greedy = Engine(deployment), Sampler(Sampling(temperature=0))
        (full,) = (list(generate(engine, engine.admit(prompt), greedy, 8)) for prompt in PROMPTS[:1])
        tokens = [sampled.token for sampled in full]

        def run(limit: int, stops: frozenset[int] = frozenset(), enough: int = 99) -> list[int]:
            made: list[int] = []

            def sink(sampled: Sampled) -> bool:
                made.append(sampled.token)
                return len(made) < enough

            request = Request(engine.admit(PROMPTS[0]), greedy, limit, sink, stops)
            engine.submit(request)
            finish(engine)
            assert request.finished
            return made

        assert run(5) == tokens[:5]
        assert run(8, enough=3) == tokens[:3]
        assert run(8, stops=frozenset({tokens[2]})) == tokens[: tokens.index(tokens[2]) + 1]
        assert run(0) == []

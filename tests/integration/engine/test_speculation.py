"""Drafted tokens change nothing but the speed: the same tokens and logprobs, whatever is drafted, for any requests."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from master.generation.batcher import Batcher, Work
from master.generation.client import Client
from master.generation.engine import Engine
from master.generation.request import Request
from master.generation.speculation import speculation
from master.generation.speculation.pace import Gain, Pace
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.cluster.inprocess import in_process_deployment, in_process_engine
from tests.support.models import MODELS, make_model
from tests.support.speculating import ANSWER, PROMPTS, Heard, Oracle, answers, draft_always, samplers
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack

Packs = Callable[..., Pack]


@pytest.fixture(autouse=True)
def _always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)


@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shares", [[1], [2, 1, 3]])
@pytest.mark.parametrize("streams", [1, 3, 8])
def test_drafts_change_no_answer(
    right: float, shares: list[float], streams: int, tiny_pack: Packs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_process_engine(tiny_pack("llama", "q4"), shares, tmp_path, chunk=16) as engine:
        engine.drafts = False
        expected = answers(engine, samplers(streams))
        oracle = Oracle(expected, right)
        monkeypatch.setattr(speculation, "look_up", oracle)
        engine.drafts = True
        assert answers(engine, samplers(streams)) == expected
        assert oracle.drafted
        drafted, accepted = engine.speculation.drafted["lookup"], engine.speculation.accepted["lookup"]
        assert drafted > 0
        if right in (0.0, 1.0):
            assert (accepted > 0) == bool(right)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """A model with twelve layers."""
    model, target = make_model("llama", tmp_path_factory.mktemp("deep"), layers=12), tmp_path_factory.mktemp("packs")
    pack_model(open_source(model.directory), "q4", target / "deep")
    return Pack.open(target / "deep")


@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("nodes", "streams"), [(2, 1), (3, 1), (4, 2), (6, 2), (3, 5), (12, 6), (12, 8)])
def test_drafts_in_steps_of_their_own_change_no_answer(
    right: float, nodes: int, streams: int, deep: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "runs_ahead", lambda *_: True)
    monkeypatch.setattr(Pace, "most_ahead", lambda pace, most: most)
    with closing(in_process_deployment(deep, [1] * nodes, tmp_path, stages=str(nodes))) as deployment:
        engine = Engine(deployment)
        engine.drafts = False
        expected = answers(engine, samplers(streams))
        monkeypatch.setattr(speculation, "look_up", Oracle(expected, right))
        engine.drafts = True
        longest = 0

        def accept(batcher: Batcher, item: Work, right: int, after: Callable[..., None] = Batcher.accept) -> None:
            nonlocal longest
            longest = max(longest, len(item.sequence.ahead))
            after(batcher, item, right)

        monkeypatch.setattr(Batcher, "accept", accept)
        assert answers(engine, samplers(streams)) == expected
        drafted, accepted = engine.speculation.drafted["lookup"], engine.speculation.accepted["lookup"]
        assert longest >= nodes // streams - 1
        assert drafted > 0 or streams > nodes == 3  # then each stage has a step of another request
        if right in (0.0, 1.0) and drafted:
            assert (accepted > 0) == bool(right)
        assert deployment.pages.free == deployment.pages.total


def test_withdrawn_and_preempted_requests_leave_no_drafts_in_flight(
    deep: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "runs_ahead", lambda *_: True)
    monkeypatch.setattr(Pace, "most_ahead", lambda pace, most: most)
    with closing(in_process_deployment(deep, [1] * 6, tmp_path, stages="6", pool=4)) as deployment:
        engine = Engine(deployment)
        engine.drafts = False
        expected = answers(engine, samplers(3))
        monkeypatch.setattr(speculation, "look_up", Oracle(expected, 0.8))
        engine.drafts = True
        assert answers(engine, samplers(3)) == expected
        assert engine.admission.preempted
        heard = Heard()
        first = Request(engine.admit(PROMPTS[0]), samplers(1)[0], ANSWER, heard.sink, logprobs=2)
        engine.submit(first)
        while not first.sequence.ahead:
            engine.step()
        engine.withdraw(first)
        said = len(heard.sampled)
        assert not first.sequence.ahead
        assert first.sequence.sent == first.sequence.computed  # no token is left out if the sequence goes on
        assert answers(engine, samplers(3)) == expected
        assert heard.told == expected[0][:said]
        engine.release(first.sequence)
        assert deployment.pages.free == deployment.pages.total


@pytest.mark.parametrize("ahead", [False, True])
def test_a_drafted_token_that_ends_the_answer_counts_as_right(
    ahead: bool, deep: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both forms of drafting, right tokens are drafted ones that were drawn, and all counters agree."""
    monkeypatch.setattr(Pace, "runs_ahead", lambda *_: ahead)
    monkeypatch.setattr(Pace, "most_ahead", lambda pace, most: most)
    drafted, start = dict[int, int](), Batcher.start

    def noted(batcher: Batcher, work: list[Work]) -> None:
        for item in work:
            guessed = item.drafted if item.guess is None else [item.guess]
            drafted.update(enumerate(guessed, item.position + item.count - len(guessed)))
        start(batcher, work)

    monkeypatch.setattr(Batcher, "start", noted)
    with closing(in_process_deployment(deep, [1] * 3, tmp_path, stages="3")) as deployment:
        engine = Engine(deployment)
        engine.drafts = False
        expected = answers(engine, samplers(1))
        monkeypatch.setattr(speculation, "look_up", Oracle(expected, 1.0))
        engine.drafts = True
        tokens = [token for token, _ in expected[0]]
        for place in (20, 21):
            drafted.clear()
            request = Request(
                engine.admit(PROMPTS[0]), samplers(1)[0], ANSWER, Heard().sink, frozenset({tokens[place]})
            )
            before = engine.speculation.drafted.total(), engine.speculation.accepted.total()
            engine.submit(request)
            while engine.requests:
                engine.step()
            made, right = request.drafts.made, request.drafts.right
            ended = len(request.sequence.tokens) - 1
            assert request.made < ANSWER
            assert ended in drafted
            assert right == sum(position <= ended for position in drafted)
            assert made == len(drafted)
            assert engine.speculation.drafted.total() == before[0] + made
            assert engine.speculation.accepted.total() == before[1] + right
            engine.release(request.sequence)


class Counting:
    """A grammar that forces every token: the token `n + 3` at place n of the answer."""

    def __init__(self) -> None:
        self.place = 0

    def forced(self) -> list[int]:
        return [3 + self.place + more for more in range(10)]

    def allowed(self, tokens: SequenceOf[int]) -> int:
        right = [token == 3 + self.place + index for index, token in enumerate(tokens)]
        return next((index for index, each in enumerate(right) if not each), len(tokens))

    def allow(self, logits: np.ndarray) -> np.ndarray:
        return np.where(np.arange(len(logits)) == 3 + self.place, logits, -np.inf).astype(np.float32)

    def accept(self, token: int) -> None:
        assert token == 3 + self.place
        self.place += 1


def test_tokens_that_a_grammar_forces_go_on_in_steps_of_their_own(
    deep: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "runs_ahead", lambda *_: True)
    monkeypatch.setattr(Pace, "most_ahead", lambda pace, most: most)
    monkeypatch.setattr(speculation, "look_up", lambda tokens, earlier, most: ([], 0))
    alone, start = list[int](), Batcher.start

    def noted(batcher: Batcher, work: list[Work]) -> None:
        alone.extend(item.position for item in work if item.guess is None)
        start(batcher, work)

    monkeypatch.setattr(Batcher, "start", noted)
    with closing(in_process_deployment(deep, [1] * 3, tmp_path, stages="3")) as deployment:
        engine = Engine(deployment)
        (told,) = answers(engine, [Sampler(Sampling(temperature=0), Counting())])
        assert [token for token, _ in told] == list(range(3, 3 + ANSWER))
        assert len(alone) == 2  # the prompt and the first token of the answer: all others were drafted
        assert engine.speculation.accepted["grammar"] >= ANSWER - 3


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_a_token_has_the_same_bits_in_a_step_of_several(
    family: str, dtype: str, tiny_pack: Packs, tmp_path: Path
) -> None:
    tokens = PROMPTS[2]

    def cut(engine: Engine, rows: int) -> np.ndarray:
        sequence, found = engine.admit(tokens), []
        while sequence.pending:
            work = engine._steps.batcher._work(sequence, min(rows, sequence.pending))
            engine._steps.start([work], [])
            found.append(engine.deployment.vocabulary.head(engine._steps.result([work])))
        engine.release(sequence)
        return np.concatenate(found)

    with in_process_engine(tiny_pack(family, dtype), [1], tmp_path) as engine:
        alone = cut(engine, 1)
        for rows in (2, 3, 5, 16):
            np.testing.assert_array_equal(cut(engine, rows), alone)


@pytest.fixture
def engine(tiny_pack: Packs, tmp_path: Path) -> Iterator[Engine]:
    with in_process_engine(tiny_pack("llama"), [1], tmp_path, chunk=16, pool=9) as found:
        yield found


def test_preempted_requests_go_on_as_without_drafts(engine: Engine) -> None:
    engine.drafts = False
    expected, preempted = answers(engine, samplers(8)), engine.admission.preempted
    assert preempted
    engine.drafts = True
    assert answers(engine, samplers(8)) == expected
    assert engine.admission.preempted > preempted


def test_an_answer_ends_at_a_stop_in_the_middle_of_a_draft(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.drafts = False
    expected = answers(engine, samplers(1))
    monkeypatch.setattr(speculation, "look_up", Oracle(expected, 1.0))
    stop = frozenset({expected[0][20][0]})
    short = answers(engine, samplers(1), stop)
    engine.drafts = True
    assert answers(engine, samplers(1), stop) == short
    assert len(short[0]) <= 21


def test_a_step_that_ends_an_answer_counts_no_token_after_the_end(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.drafts = False
    expected = answers(engine, samplers(1))
    monkeypatch.setattr(speculation, "look_up", Oracle(expected, 1.0))
    engine.drafts = True
    counted, learn = list[int](), Gain.learn

    def noted(gain: Gain, tokens: int, saved: float) -> None:
        counted.append(tokens)
        learn(gain, tokens, saved)

    monkeypatch.setattr(Gain, "learn", noted)
    for place in (20, 21):
        counted.clear()
        (told,) = answers(engine, samplers(1), frozenset({expected[0][place][0]}))
        assert sum(counted) == len(told) - 1  # the first token comes with the prompt


def test_the_answers_of_one_client_are_no_drafts_of_another(engine: Engine) -> None:
    def drafted(client: Client) -> int:
        before = engine.speculation.drafted.total()
        heard = Heard()
        sequence = engine.admit(PROMPTS[1], client=client)
        engine.submit(Request(sequence, Sampler(Sampling(temperature=0)), 12, heard.sink))
        while engine.requests:
            engine.step()
        engine.release(sequence)
        return engine.speculation.drafted.total() - before

    one, other = Client("one", b"1" * 16), Client("other", b"2" * 16)
    first = drafted(one)
    assert drafted(one) > first
    assert drafted(other) == first

"""A draft model changes nothing but the speed, whether it is always right or mostly wrong."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from master.generation.engine import Engine
from master.generation.request import Request, Sampled
from master.generation.speculation import speculation
from master.generation.speculation.draftmodel import DraftModel, most_likely
from master.generation.speculation.drafts import Draft
from master.generation.speculation.pace import ROWS, Gain, Pace
from master.generation.speculation.speculation import Speculation
from master.vocabulary.sampler import Logprobs, Sampler, Sampling
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.models import VOCAB
from tpi.pack.reader import Pack

Packs = Callable[..., Pack]
PROMPTS = [[1, *np.random.default_rng(seed).integers(3, VOCAB, 5 + 9 * seed).tolist()] for seed in range(8)]
Told = tuple[int, Logprobs | None]
KINDS = (
    Sampling(temperature=0),
    Sampling(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=3),
    Sampling(temperature=0, repeat_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    Sampling(temperature=0.7, seed=5, bias={7: 3.0}),
)


@pytest.fixture(autouse=True)
def _always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft with the model as many rows as a step may have, whether that makes it faster or not."""

    def fits(pace: Pace, plain: int, drafted: list[float], further: list[float], spent: float) -> bool:
        return plain + len(drafted) + len(further) <= ROWS

    monkeypatch.setattr(Pace, "drafts", property(lambda pace: True))
    monkeypatch.setattr(Pace, "rows", lambda pace, plain, chances: min(len(chances), ROWS - plain))
    monkeypatch.setattr(Pace, "continues", fits)
    monkeypatch.setattr(Gain, "off", property(lambda gain: False))
    monkeypatch.setattr(speculation, "look_up", lambda tokens, earlier, most: ([], 0))


@pytest.fixture
def model(tiny_pack: Packs, tmp_path: Path) -> Iterator[Callable[..., DraftModel]]:
    """Open a draft model with a number of pages, made from a family and a format."""
    opened = []

    def open_(family: str, dtype: str = "q4", pool: int = 32) -> DraftModel:
        deployment = in_process_deployment(tiny_pack(family, dtype), [1], tmp_path / "draft", pool=pool)
        opened.append(deployment)
        return DraftModel(deployment, VOCAB)

    yield open_
    for each in opened:
        each.close()


def answers(engine: Engine, streams: int, stops: frozenset[int] = frozenset()) -> list[list[Told]]:
    """Run requests that begin one step after the other; return the tokens and log probabilities of each."""
    heard: list[list[Told]] = [[] for _ in range(streams)]
    asked = list[Request]()

    def sink(number: int) -> Callable[[Sampled], bool]:
        def take(sampled: Sampled) -> bool:
            heard[number].append((sampled.token, sampled.logprobs))
            return True

        return take

    for number in range(streams):
        sequence, sampler = engine.admit(PROMPTS[number]), Sampler(KINDS[number % len(KINDS)])
        asked.append(Request(sequence, sampler, 40 - 3 * number, sink(number), stops, logprobs=2))
        engine.submit(asked[-1])
        engine.step()
    while engine.requests:
        engine.step()
        for request in asked:
            if request.finished:
                engine.release(request.sequence)
    return heard


@pytest.mark.parametrize(("family", "right"), [("llama", True), ("opt", False)])
@pytest.mark.parametrize(("shares", "stages"), [([1], "1"), ([2, 1, 3], "1"), ([1, 1], "2")])
@pytest.mark.parametrize("streams", [1, 4])
def test_a_draft_model_changes_no_answer(
    family: str,
    right: bool,
    shares: list[float],
    stages: str,
    streams: int,
    model: Callable[..., DraftModel],
    tiny_pack: Packs,
    tmp_path: Path,
) -> None:
    with closing(in_process_deployment(tiny_pack("llama", "q4"), shares, tmp_path, stages=stages)) as deployment:
        expected = answers(Engine(deployment), streams)
        engine = Engine(deployment, model=model(family))
        assert answers(engine, streams) == expected
        drafted, accepted = engine.speculation.drafted["model"], engine.speculation.accepted["model"]
        if stages != "1" and streams > 1:
            return  # each stage has steps of other requests, so nothing is drafted
        assert drafted > 0
        if streams == 1 and right and len(shares) == 1:  # several nodes add partial sums in another order
            assert accepted == drafted
        elif right:
            assert accepted > 0


def test_requests_that_are_preempted_are_drafted_for_again(
    model: Callable[..., DraftModel], tiny_pack: Packs, tmp_path: Path
) -> None:
    with closing(in_process_deployment(tiny_pack("llama"), [1], tmp_path, pool=9)) as deployment:
        plain = Engine(deployment)
        expected = answers(plain, 8)
        engine = Engine(deployment, model=model("llama", "f32", pool=12))  # too few pages for all sequences
        assert answers(engine, 8) == expected
        assert engine.admission.preempted
        assert engine.speculation.accepted["model"] > 0


def test_an_answer_ends_at_a_stop_that_the_model_drafted(
    model: Callable[..., DraftModel], tiny_pack: Packs, tmp_path: Path
) -> None:
    with closing(in_process_deployment(tiny_pack("llama"), [1], tmp_path)) as deployment:
        stop = frozenset({answers(Engine(deployment), 1)[0][20][0]})
        expected = answers(Engine(deployment), 1, stop)
        assert answers(Engine(deployment, model=model("llama", "f32")), 1, stop) == expected
        assert len(expected[0]) <= 21


class EvenTokens:
    """A grammar that allows only even tokens, and forces none."""

    def forced(self) -> list[int]:
        return []

    def allowed(self, tokens: SequenceOf[int]) -> int:
        return next((count for count, token in enumerate(tokens) if token % 2), len(tokens))

    def allow(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return np.where(np.arange(len(logits)) % 2, -np.inf, logits)

    def accept(self, token: int) -> None:
        assert token % 2 == 0


def test_drafts_end_where_the_grammar_forbids_a_token(
    model: Callable[..., DraftModel], tiny_pack: Packs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = list[Draft]()
    cut = Speculation._cut

    def noted(self: Speculation, found: dict[int, Draft], plain: int) -> dict[int, Draft]:
        drafts.extend(found.values())
        return cut(self, found, plain)

    monkeypatch.setattr(Speculation, "_cut", noted)

    def told(engine: Engine) -> list[Told]:
        heard = list[Told]()

        def take(sampled: Sampled) -> bool:
            heard.append((sampled.token, sampled.logprobs))
            return True

        sampler = Sampler(Sampling(temperature=0), EvenTokens())
        engine.submit(Request(engine.admit(PROMPTS[1]), sampler, 30, take, logprobs=2))
        while engine.requests:
            engine.step()
        return heard

    with closing(in_process_deployment(tiny_pack("llama"), [1], tmp_path)) as deployment:
        expected = told(Engine(deployment))
        assert told(Engine(deployment, model=model("llama", "f32"))) == expected
        assert any(draft.tokens for draft in drafts)
        assert not any(token % 2 for draft in drafts for token in draft.tokens)


def test_drafts_go_on_after_the_deployment_is_replaced(
    model: Callable[..., DraftModel], tiny_pack: Packs, tmp_path: Path
) -> None:
    pack = tiny_pack("llama", "q4")
    with closing(in_process_deployment(pack, [1], tmp_path)) as one:
        expected = answers(Engine(one), 1)
        with closing(in_process_deployment(pack, [1], tmp_path / "other", epoch=2)) as other:
            engine, heard = Engine(one, model=model("llama")), list[Told]()

            def take(sampled: Sampled) -> bool:
                heard.append((sampled.token, sampled.logprobs))
                return True

            request = Request(
                engine.admit(PROMPTS[0]),
                Sampler(KINDS[0]),
                40,
                take,
                logprobs=2,
            )
            engine.submit(request)
            while request.made < 10:
                engine.step()
            engine.replace(other)
            before = engine.speculation.accepted["model"]
            while engine.requests:
                engine.step()
            assert heard == expected[0]
            assert engine.speculation.accepted["model"] > before


def test_a_token_that_the_draft_model_lacks_ends_its_drafts(
    tiny_pack: Packs, tmp_path: Path, model: Callable[..., DraftModel]
) -> None:
    with closing(in_process_deployment(tiny_pack("llama", "q4"), [1], tmp_path)) as deployment:
        small = model("llama")
        small._vocab = min(PROMPTS[0])  # below every token of the prompt
        engine = Engine(deployment, model=small)
        assert len(answers(engine, 1)[0]) == 40
        assert not engine.speculation.drafted


def test_the_most_likely_token_has_its_probability() -> None:
    token, probability = most_likely(np.log(np.array([0.2, 0.7, 0.1], np.float32)) + 5)
    assert token == 1
    assert probability == pytest.approx(0.7)

"""The engine on its thread: requests from several threads, cancelled at any time; full, failing and stopping ones."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event, Thread

import pytest

from master.generation.answer import AnswerLimits, answer
from master.generation.engine import Engine
from master.generation.request import Sampled
from master.generation.thread import EngineRequest, EngineThread, FixedNodes, StillWanted, Ticket
from master.text.tokenizer import Tokenizer
from master.vocabulary.sampler import F32, Sampler, Sampling
from tests.support.cluster.inprocess import in_process_engine
from tpi.errors import BusyError, NodeLost, TpiError, UsageError
from tpi.pack.reader import Pack

WAIT_S = 60


class Heard:
    """The tokens of an answer, and its end."""

    def __init__(self, most: int = 1000) -> None:
        self.tokens: list[int] = []
        self.first, self.over = Event(), Event()
        self.error: TpiError | None = None
        self.most = most

    def token(self, sampled: Sampled) -> bool:
        self.tokens.append(sampled.token)
        self.first.set()
        return len(self.tokens) < self.most

    def ended(self, error: TpiError | None) -> None:
        assert not self.over.is_set()
        self.error = error
        self.over.set()


def submitted(thread: EngineThread, prompt: list[int], heard: Heard, limit: int = 20) -> Ticket:
    ticket = Ticket(EngineRequest(prompt, Sampler(Sampling(temperature=0)), limit), heard)
    thread.submit(ticket)
    return ticket


@pytest.fixture
def engine(tiny_pack: Callable[..., Pack], tmp_path: Path) -> Iterator[Engine]:
    with in_process_engine(tiny_pack("llama"), [1, 1], tmp_path) as engine:
        yield engine


@pytest.fixture
def thread(engine: Engine) -> Iterator[EngineThread]:
    thread = EngineThread(engine, most_waiting=100)
    thread.start()
    yield thread
    thread.stop()
    assert thread.open == 0
    assert engine.deployment.pages.free == engine.deployment.pages.total


def test_requests_of_several_threads(thread: EngineThread) -> None:
    heard = [Heard() for _ in range(8)]

    def ask(number: int) -> None:
        submitted(thread, [5 + number, 6, 7], heard[number])

    threads = [Thread(target=ask, args=(number,)) for number in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert all(one.over.wait(WAIT_S) for one in heard)
    alone = Heard()
    submitted(thread, [5 + 3, 6, 7], alone)
    assert alone.over.wait(WAIT_S)
    assert alone.tokens == heard[3].tokens
    assert [len(one.tokens) for one in heard] == [20] * 8


def test_giving_up_ends_once_and_gives_the_pages_back(thread: EngineThread, engine: Engine) -> None:
    heard = Heard()
    ticket = submitted(thread, [5, 6, 7], heard, 100)
    assert heard.first.wait(WAIT_S)
    thread.cancel(ticket)
    thread.cancel(ticket)
    assert heard.over.wait(WAIT_S)
    assert heard.error is None
    assert thread.call(lambda: engine.deployment.pages.free).result(WAIT_S) == engine.deployment.pages.total


def test_a_prompt_that_cannot_be_is_heard_of(thread: EngineThread) -> None:
    heard = Heard()
    submitted(thread, [1] * 500, heard)
    assert heard.over.wait(WAIT_S)
    assert isinstance(heard.error, UsageError)


class BrokenToken(Heard):
    def token(self, sampled: Sampled) -> bool:
        raise ValueError("broken")


class BrokenEnd(Heard):
    def ended(self, error: TpiError | None) -> None:
        if error is None:
            raise ValueError("broken")
        super().ended(error)


class BrokenSampler(Sampler):
    def sample(self, logits: F32, history: Sequence[int] = (), prompt: int = 0) -> int:
        raise ValueError("broken")


def broken_rows(rows: F32) -> None:
    raise ValueError("broken")


GREEDY = Sampler(Sampling(temperature=0))
FAULTS: dict[str, tuple[Heard, EngineRequest]] = {
    "a token": (BrokenToken(), EngineRequest([5, 6, 7], GREEDY, 20)),
    "the end": (BrokenEnd(), EngineRequest([5, 6, 7], GREEDY, 20)),
    "the draw": (Heard(), EngineRequest([5, 6, 7], BrokenSampler(Sampling()), 20)),
    "hidden states": (Heard(), EngineRequest([5, 6, 7], GREEDY, 20, rows=broken_rows)),
    "a prompt that is no numbers": (Heard(), EngineRequest(["x"], GREEDY, 20)),  # type: ignore[list-item]
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_one_request_ends_it_alone(
    fault: str, thread: EngineThread, caplog: pytest.LogCaptureFixture
) -> None:
    other = Heard()
    submitted(thread, [5, 6, 8], other)
    heard, ask = FAULTS[fault]
    thread.submit(Ticket(ask, heard))
    assert heard.over.wait(WAIT_S)
    assert other.over.wait(WAIT_S)
    assert (len(other.tokens), other.error) == (20, None)
    assert "the answer failed: " in str(heard.error)
    assert "failed" in caplog.text or "could not begin" in caplog.text
    assert thread.problem is None


def test_too_many_are_told_to_come_back(engine: Engine) -> None:
    thread, heard = EngineThread(engine, most_waiting=-engine.admission.most + 1), Heard()
    submitted(thread, [5, 6, 7], heard)  # not started yet: it stays under way
    with pytest.raises(BusyError, match="1 requests are in progress"):
        submitted(thread, [5, 6, 7], Heard())
    thread.start()
    assert heard.over.wait(WAIT_S)
    thread.stop()
    with pytest.raises(BusyError, match="shutting down"):
        submitted(thread, [5, 6, 7], Heard())


def test_stopping_lets_requests_finish_or_ends_them(engine: Engine) -> None:
    thread, heard = EngineThread(engine, 10), [Heard(), Heard()]
    thread.start()
    submitted(thread, [5, 6, 7], heard[0])
    thread.stop(WAIT_S)
    assert len(heard[0].tokens) == 20
    thread = EngineThread(engine, 10)
    thread.start()
    submitted(thread, [5, 6, 7], heard[1], 100)  # not over before it is stopped
    thread.stop(0)
    assert isinstance(heard[1].error, BusyError)


@pytest.mark.parametrize("recovers", [False, True])
def test_a_step_that_fails(recovers: bool, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests end with the reason, unless the nodes recover; then the requests continue."""
    lost, steps, real = NodeLost("worker-1", "worker-1 is lost"), list[int](), engine.step

    def step() -> None:
        steps.append(1)
        if len(steps) == 5:
            raise lost
        real()

    monkeypatch.setattr(engine, "step", step)
    thread, heard = EngineThread(engine, 10, _Mended(recovers)), Heard()
    submitted(thread, [5, 6, 7], heard)
    thread.start()
    assert heard.over.wait(WAIT_S)
    assert (heard.error, len(heard.tokens)) == ((None, 20) if recovers else (lost, 4))
    thread.stop()


class _Mended(FixedNodes):
    """Nodes that recover, or do not."""

    def __init__(self, recovers: bool) -> None:
        self._recovers = recovers

    def recover(self, error: TpiError, wanted: StillWanted) -> bool:
        return self._recovers


class _Waiting(FixedNodes):
    """Nodes that wait for workers, without which nothing can be computed, until the wait is cancelled."""

    def __init__(self, begun: Event) -> None:
        self.begun = begun

    def welcome(self, fresh: bool, wanted: StillWanted) -> None:
        while wanted():
            self.begun.set()
            Event().wait(0.01)
        raise NodeLost("", "no request waits for them any more")


def test_while_workers_are_waited_for_requests_come_and_go(engine: Engine) -> None:
    heard, begun = [Heard() for _ in range(3)], Event()
    thread = EngineThread(engine, 10, _Waiting(begun))
    thread.start()
    tickets = [submitted(thread, [5, 6, 7], each) for each in heard[:2]]
    assert begun.wait(WAIT_S)
    asked = thread.call(lambda: None)  # of a deployment, and there is none
    thread.cancel(tickets[0])
    assert heard[0].over.wait(WAIT_S)
    assert not heard[1].over.is_set()
    assert not asked.done()
    thread.cancel(tickets[1])
    assert heard[1].over.wait(WAIT_S)
    asked.result(WAIT_S)  # no request waits any more
    begun.clear()
    submitted(thread, [5, 6, 7], heard[2])
    assert begun.wait(WAIT_S)
    later = thread.call(lambda: None)
    thread.stop(0)
    assert isinstance(heard[2].error, BusyError)
    assert isinstance(later.exception(WAIT_S), BusyError)
    assert thread.open == 0


def test_a_stopped_answer_waits_for_no_worker(engine: Engine, tiny_pack: Callable[..., Pack]) -> None:
    begun, tokenizer, limits = Event(), Tokenizer.load(tiny_pack("llama")), AnswerLimits(5, ignore_eos=True)
    for nodes, tokens in ((_Waiting(begun), 0), (FixedNodes(), 5)):
        thread = EngineThread(engine, 10, nodes)
        thread.start()
        stopped = begun.is_set if tokens == 0 else lambda: False
        made = answer(thread, tokenizer, [5, 6, 7], Sampler(Sampling(temperature=0)), limits, stopped=stopped)
        thread.stop()
        assert (len(made.token_ids), made.finish_reason) == (tokens, "length" if tokens else "interrupted")

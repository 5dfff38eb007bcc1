"""Eight answers at once, as a server computes them, over workers that are killed and come back."""

import signal
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from master.generation.request import Sampled
from master.generation.thread import EngineRequest, Ticket
from master.options import RunOptions
from master.session import Session
from master.vocabulary.sampler import Sampler
from tests.support.house import GREEDY, during_step, house, timed_answer, until
from tests.support.models import TinyModel
from tpi.errors import TpiError

STREAMS, LENGTH = 8, 40
PROMPTS = [[5 + number, 6, 7 + number, 8] for number in range(STREAMS)]


class Stream:
    """A listener to one answer."""

    def __init__(self, at: Callable[[], None]) -> None:
        self._at = at
        self.tokens: list[int] = []
        self.over = Event()
        self.error: TpiError | None = None

    def token(self, sampled: Sampled) -> bool:
        self.tokens.append(sampled.token)
        self._at()
        return True

    def ended(self, error: TpiError | None) -> None:
        self.error = error
        self.over.set()


@pytest.mark.parametrize("stages", ["1", "2"])
def test_eight_streams_lose_no_token_when_workers_are_killed(
    stages: str, tmp_path: Path, tiny_model: Callable[[str], TinyModel]
) -> None:
    model = str(tiny_model("llama").directory)
    with house(tmp_path, 3) as laptops:
        addresses = tuple(one.address for one in laptops)
        options = RunOptions(model, workers=addresses, cache=tmp_path / "m", stages=stages)
        with Session(options) as session:
            wanted = [timed_answer(session, prompt, LENGTH).tokens for prompt in PROMPTS]
            with session.answering() as engine:
                for seed in range(3):
                    victim = laptops[seed]
                    streams = list[Stream]()
                    with during_step(
                        seed,
                        STREAMS * LENGTH,
                        lambda _, victim=victim: victim.signal(signal.SIGKILL),  # type: ignore[misc]
                    ) as at:

                        def one_more(streams: list[Stream] = streams, at: Callable[[int], None] = at) -> None:
                            at(sum(len(stream.tokens) for stream in streams))

                        streams += [Stream(one_more) for _ in PROMPTS]
                        for prompt, stream in zip(PROMPTS, streams, strict=True):
                            engine.submit(Ticket(EngineRequest(prompt, Sampler(GREEDY), LENGTH), stream))
                        assert all(stream.over.wait(120) for stream in streams)
                    assert [stream.error for stream in streams] == [None] * STREAMS
                    assert [stream.tokens for stream in streams] == wanted, f"seed {seed}"
                    victim.start()
                    until(lambda: len(session._cluster.workers) + len(session._cluster.recruits.ready) >= 3)

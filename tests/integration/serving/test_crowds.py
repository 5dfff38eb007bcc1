"""Many clients, slow clients, clients that leave; a server that is full, ends or fails: it leaves nothing behind."""

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from threading import Event

import pytest

from master.api.state import ServeLimits
from master.generation.thread import Ticket
from tests.support.serving import client, said, tiny_server
from tpi.errors import NodeLost
from tpi.pack.reader import Pack

CHAT = "/v1/chat/completions"


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Call a condition repeatedly, with pauses, until it holds."""
    never, pauses = Event(), int(seconds / 0.02)
    assert any(condition() or never.wait(0.02) for _ in range(pauses))


_ROUNDS = 12


@pytest.mark.parametrize("seed", range(2))
def test_eight_at_random_times_hear_what_each_hears_alone(
    seed: int, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    """Greedy answers over HTTP, with so few pages that some requests are preempted and computed again."""
    drawn = random.Random(seed)
    bodies = [
        said(f"{drawn.random()} " * (1 + 2 * (number % 3)), max_tokens=60, ignore_eos=True, logprobs=True)
        for number in range(8)
    ]
    delays = [drawn.uniform(0, 0.1) for _ in bodies]

    with tiny_server(tiny_pack("llama"), tmp_path, context=256, pool=14, key=None) as served, client(served) as http:

        def tokens(body: dict[str, object], delay: float) -> list[str]:
            never.wait(delay)
            content = http.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
            return [token["token"] for token in content]

        never = Event()
        alone = [tokens(body, 0) for body in bodies]
        before = served.engine.admission.preempted
        with ThreadPoolExecutor(8) as pool:
            for closer in range(_ROUNDS):  # on a busy machine they may come one after the other: then closer together
                assert list(pool.map(tokens, bodies, (delay / 2**closer for delay in delays))) == alone
                if served.engine.admission.preempted > before:
                    break
        assert served.engine.admission.preempted > before
        assert served.pages_in_use == 0


def test_refused_clients_hear_when_to_come_back(
    tiny_pack: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_server(tiny_pack("llama"), tmp_path, ServeLimits(waiting=0), most=1) as served, client(served) as http:
        refused, step = Event(), served.engine.step

        def held_up() -> None:
            """Compute a step that lasts until the other requests were refused. The first answer runs until then."""
            step()
            refused.wait(60)

        monkeypatch.setattr(served.engine, "step", held_up)
        with http.stream("POST", CHAT, json=said(stream=True, ignore_eos=True)) as first:
            lines = first.iter_lines()  # dropped, it would close the answer
            next(lines)
            turned_away = http.post(CHAT, json=said())
            assert turned_away.status_code == 429
            assert int(turned_away.headers["retry-after"]) >= 1
            assert turned_away.json()["error"]["code"] == "busy"
            many = http.post(CHAT, json=said(n=3))
            assert many.status_code == 429
            refused.set()
        wait_for(lambda: served.thread.open == 0)
        assert http.post(CHAT, json=said()).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_client_disconnects_mid_stream(
    stream: bool, tiny_pack: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the server notices, it computes nothing for this client after the current step, and frees its pages."""
    with tiny_server(tiny_pack("llama"), tmp_path) as served, client(served) as http:
        known, steps, cancel, step = Event(), list[bool](), served.thread.cancel, served.engine.step

        def given_up(ticket: Ticket) -> None:
            cancel(ticket)
            known.set()

        def counted() -> None:
            """Make the tenth step last until the server has noticed; otherwise the answer might be finished before."""
            steps.append(known.is_set())
            step()
            if len(steps) == 10:
                known.wait(60)

        monkeypatch.setattr(served.thread, "cancel", given_up)
        monkeypatch.setattr(served.engine, "step", counted)
        if stream:
            with http.stream("POST", CHAT, json=said(stream=True, max_tokens=700, ignore_eos=True)) as answer:
                lines = answer.iter_lines()  # dropped, it would close the answer
                next(lines)
                wait_for(lambda: bool(steps))  # for a client that leaves before that, nothing is computed
        else:
            body = json.dumps(said(max_tokens=700, ignore_eos=True))
            headers = {**http.headers, "Content-Type": "application/json"}
            with closing(HTTPConnection(http.base_url.host, http.base_url.port)) as waiting:
                waiting.request("POST", CHAT, body, headers)
                wait_for(lambda: bool(steps))
        wait_for(known.is_set)
        wait_for(lambda: served.thread.open == 0)
        assert 1 <= len(steps) <= 11
        assert sum(steps) <= 1
        assert served.pages_in_use == 0


def test_an_answer_that_takes_too_long_is_ended(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    with tiny_server(tiny_pack("llama"), tmp_path, ServeLimits(answer_s=0.05)) as served, client(served) as http:
        answer = http.post(CHAT, json=said(max_tokens=700, logit_bias={"2": -100}))
        assert answer.status_code == 408
        streamed = http.post(CHAT, json=said(max_tokens=700, stream=True, logit_bias={"2": -100}))
        if streamed.status_code == 200:  # else the prompt took that long already, on a busy machine
            lines = streamed.text.split("\n\n")
            assert json.loads(lines[-3].removeprefix("data: "))["error"]["code"] == "timeout"
            assert lines[-2] == "data: [DONE]"
        wait_for(lambda: served.thread.open == 0)


def test_the_end_lets_short_answers_finish_and_ends_long_ones(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    with tiny_server(tiny_pack("llama"), tmp_path, grace_s=0.0) as served, client(served) as http:
        with http.stream("POST", CHAT, json=said(stream=True, max_tokens=700, logit_bias={"2": -100})) as answer:
            lines = answer.iter_lines()
            next(lines)
            served.server.should_exit = True
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["message"].startswith("the server is shutting down")
        assert rest[-1] == "data: [DONE]"


def test_a_lost_worker_ends_streams_with_the_reason(
    tiny_pack: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_server(tiny_pack("llama"), tmp_path) as served, client(served) as http:
        real, steps = served.engine.step, list[int]()

        def step() -> None:
            steps.append(1)
            if len(steps) == 4:
                raise NodeLost("worker-1", "worker-1 is lost")
            real()

        monkeypatch.setattr(served.engine, "step", step)
        lines = http.post(CHAT, json=said(stream=True, max_tokens=20)).text.split("\n\n")
        assert json.loads(lines[-3].removeprefix("data: "))["error"]["message"].startswith(
            "the node worker-1 failed or was lost; "
        )
        assert lines[-2] == "data: [DONE]"
        assert http.get("/health").status_code == 503
        steps.clear()
        assert http.post(CHAT, json=said(max_tokens=50)).status_code == 503
        steps.extend([1] * 9)
        assert http.post(CHAT, json=said(max_tokens=5)).status_code == 200
        assert http.get("/health").status_code == 200

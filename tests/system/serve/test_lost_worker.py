"""A worker that is killed while a stream runs: who listens hears the same tokens to the end, a little later."""

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.house import house
from tests.support.models import TinyModel
from tests.support.started import serving

pytestmark = pytest.mark.timeout(200)

LENGTH = 200
BODY = {
    "messages": [{"role": "user", "content": "Hello"}], "max_tokens": LENGTH, "temperature": 0, "stream": True,
    "ignore_eos": True, "logprobs": True,
}  # fmt: skip


def stream(http: httpx.Client, at: Callable[[int], None] = lambda count: None) -> list[str]:
    """The tokens of an answer; `at` is called with how many there are, after each event."""
    tokens: list[str] = []
    with http.stream("POST", "/v1/chat/completions", json=BODY) as answer:
        lines = [line for line in _heard(answer, tokens, at) if line]
    assert lines[-1] == "data: [DONE]"
    assert not any('"error":' in line for line in lines)
    return tokens


def _heard(answer: httpx.Response, tokens: list[str], at: Callable[[int], None]) -> Iterator[str]:
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:]).get("choices", ()):
                tokens += [one["token"] for one in (choice["logprobs"] or {"content": []})["content"]]
            at(len(tokens))
        yield line


def test_a_stream_goes_on_with_the_same_tokens(tmp_path: Path, tiny_model: Callable[[str], TinyModel]) -> None:
    """One worker is killed under the second stream, the other freezes under the third."""
    with house(tmp_path, 2) as laptops:
        model, workers = str(tiny_model("llama").directory), ",".join(one.address for one in laptops)
        with serving(tmp_path, "-m", model, "--workers", workers) as http:
            wanted = stream(http)
            assert len(wanted) > LENGTH - 10  # control tokens are not shown
            for victim, number in zip(laptops, (signal.SIGKILL, signal.SIGSTOP), strict=True):
                struck: list[int] = []

                def strike(count: int) -> None:
                    if count >= 3 and not struck:  # noqa: B023 - called within this turn
                        struck.append(count)  # noqa: B023
                        victim.signal(number)  # noqa: B023

                assert stream(http, strike) == wanted
                assert struck[0] < LENGTH
                assert http.get("/health").status_code == 200
                assert re.search(rf"worker {victim.name} \S+ is lost", (tmp_path / "log").read_text())
            assert stream(http) == wanted  # whoever asks next is answered as before
    assert "Traceback" not in (tmp_path / "log").read_text()

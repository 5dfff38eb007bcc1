"""A worker is killed during a stream: the client gets the same tokens to the end, a little later."""

import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.house import house, until
from tests.support.models import TinyModel
from tests.support.started import server, serving

pytestmark = pytest.mark.timeout(200)

LENGTH = 200
BODY = {
    "messages": [{"role": "user", "content": "Hello"}], "max_tokens": LENGTH, "temperature": 0, "stream": True,
    "ignore_eos": True, "logprobs": True,
}  # fmt: skip


def stream(http: httpx.Client, at: Callable[[int], None] = lambda count: None) -> list[str]:
    """Return the tokens of an answer; call `at` with their number after each event."""
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
    """One worker is killed during the second stream, the other is frozen during the third."""
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
            assert stream(http) == wanted  # the next request is answered as before
    assert "Traceback" not in (tmp_path / "log").read_text()


LONG = 8192  # tokens of context: keys and values of 6 MB, which is what makes the model too large for one
TIGHT = ("-c", str(LONG), "--memory", "12MiB", "--split", "1,2")


def long_model(directory: Path, root: Path) -> Path:
    """Copy the model in `directory` to `root`, and give the copy a context of `LONG` tokens."""
    shutil.copytree(directory, root)
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG}))
    return root


def test_a_server_that_waits_for_a_worker_ends_on_a_signal(
    tmp_path: Path, tiny_model: Callable[[str], TinyModel]
) -> None:
    """Without the worker the model does not fit. The waiting answer ends with a reason, and no process remains."""
    model = long_model(tiny_model("llama").directory, tmp_path / "model")
    with house(tmp_path, 1) as (laptop,):
        flags = ("--workers", laptop.address, "--patience", "3600", *TIGHT)
        with server(tmp_path, "-m", str(model), *flags) as (process, http):
            ours = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            lines = list[str]()
            with http.stream("POST", "/v1/chat/completions", json=BODY | {"max_tokens": LONG - 100}) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    if len(lines) == 5:
                        laptop.signal(signal.SIGKILL)
                        until(lambda: "Waiting 3600 s for workers" in (tmp_path / "log").read_text())
                        process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert psutil.wait_procs(ours, timeout=10)[1] == []
            with pytest.raises(httpx.ConnectError):
                http.get("/health")
    said = [line for line in lines if line]
    assert "the server is shutting down" in said[-2]
    assert said[-1] == "data: [DONE]"
    assert "Traceback" not in (tmp_path / "log").read_text()

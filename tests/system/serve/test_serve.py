"""`tpi serve` with SmolLM2 on three local nodes, curl, the official clients, and signals."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from jsonschema import validate

from tests.support.commands import TPI, clean
from tests.support.house import until
from tests.support.paths import ROOT
from tpi.config import default_cache
from tpi.pack.library.pull import pull

if TYPE_CHECKING:
    from openai import OpenAI  # takes long to import, and every process of the tests collects this file

pytestmark = pytest.mark.timeout(400)

KEY, MODEL = "house", "smollm2-135m"
ASK: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
CURL = re.findall(r"```sh\n(curl .*?)```", (ROOT / "docs/serving.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    gguf, folder = pull(MODEL, default_cache()), tmp_path_factory.mktemp("serve")
    command = [
        *TPI,
        "serve",
        "-m",
        str(gguf),
        "--local",
        "2",
        "--port",
        "0",
        "--alias",
        MODEL,
        "--alias",
        "gpt-5",
        "-c",
        "1024",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=clean(folder, {"TPI_API_KEY": KEY})
        )
        assert process.stdout
        line = next((line for line in process.stdout if " is served at " in line), "")
        assert line, (folder / "log").read_text()
        children = psutil.Process(process.pid).children(recursive=True)
        yield re.findall(r"http://[^;\s]+", line)[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        process.stdout.close()
    assert psutil.wait_procs(children, timeout=10)[1] == []
    said = (folder / "log").read_text()
    assert "Traceback" not in said, said
    assert "leaked" not in said, said


@pytest.fixture
def ai(url: str) -> Iterator["OpenAI"]:
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120) as ai:
        yield ai


@pytest.mark.parametrize("line", CURL, ids=lambda line: re.sub(r"\W+", " ", line)[8:40])
def test_lines_of_the_page(line: str, url: str) -> None:
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, "URL": url, "KEY": KEY},
    )  # fmt: skip
    assert done.stdout
    assert '"error":{' not in done.stdout.replace(" ", "")
    if "/metrics" in line:
        assert f'vllm:prompt_tokens_total{{model_name="{MODEL}"}}' in done.stdout
    elif '"stream": true' in line:
        assert done.stdout.endswith("data: [DONE]\n\n")
    else:
        assert json.loads(done.stdout)


def test_the_line_of_the_readme(url: str) -> None:
    """The README's command is for a server without a key at the default port."""
    (line,) = re.findall(r"^curl (?:.*\\\n)*.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    here = line.replace("http://127.0.0.1:8080", url) + f" -H 'x-api-key: {KEY}'"
    done = subprocess.run(["bash", "-c", here], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_there_are_lines_for_every_path() -> None:
    paths = {match[0] for line in CURL if (match := re.findall(r"\$URL(/[\w/]+)", line))}
    assert {"/health", "/metrics", "/v1/models", "/v1/messages", "/v1/responses", "/v1/embeddings"} <= paths
    assert {"/v1/chat/completions", "/v1/completions"} <= paths


def test_it_answers_in_a_stream_as_in_one_piece(ai: "OpenAI") -> None:
    whole = ai.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=24)
    stream = ai.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=24, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content
    assert "Paris" in text


def test_many_at_once(ai: "OpenAI") -> None:
    def ask(number: int) -> str | None:
        turns: list[Any] = [{"role": "user", "content": f"Name {number + 2} colours."}]
        answer = ai.chat.completions.create(model=MODEL, messages=turns, temperature=0, max_tokens=16)
        return answer.choices[0].message.content

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(8)))


def test_streams_of_every_form_logprobs_and_errors(ai: "OpenAI") -> None:
    from openai import AuthenticationError, BadRequestError, NotFoundError

    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    for chunk in ai.completions.create(prompt="Once upon a time", stream=True, logprobs=2, **asked):
        assert all(choice.logprobs and choice.logprobs.tokens for choice in chunk.choices if choice.text)
    best = ai.chat.completions.create(messages=ASK, logprobs=True, top_logprobs=3, **asked).choices[0].logprobs
    assert best
    assert best.content
    assert all(one.logprob == one.top_logprobs[0].logprob for one in best.content)
    events = [event.type for event in ai.responses.create(model=MODEL, input="Hello", max_output_tokens=6, stream=True)]
    assert events[0] == "response.created"
    assert events[-1] in ("response.completed", "response.incomplete")
    assert [model.id for model in ai.models.list()] == [MODEL, "gpt-5"]
    with pytest.raises(NotFoundError, match="there is no model"):
        ai.chat.completions.create(messages=ASK, **asked | {"model": "gpt-9"})
    with pytest.raises(BadRequestError, match="max_tokens"):
        ai.chat.completions.create(messages=ASK, **asked | {"max_tokens": -2})
    with pytest.raises(AuthenticationError):
        ai.with_options(api_key="wrong").models.list()


def test_a_tool_round_trip(ai: "OpenAI") -> None:
    tool: Any = {"type": "function", "function": {"name": "book", "description": "Books a trip.", "parameters": SCHEMA}}
    turns: list[Any] = [{"role": "user", "content": "Book three days in Paris."}]
    first = ai.chat.completions.create(
        model=MODEL, messages=turns, tools=[tool], tool_choice="required", max_tokens=120, parallel_tool_calls=False,
        temperature=0,
    )  # fmt: skip
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls
    call: Any = message.tool_calls[0]
    validate(json.loads(call.function.arguments), SCHEMA)
    turns += [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "Booked."}]
    second = ai.chat.completions.create(model=MODEL, messages=turns, tools=[tool], tool_choice="none", max_tokens=12)
    assert second.choices[0].message.content


def test_a_schema_and_a_response(ai: "OpenAI") -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
    answer = ai.chat.completions.create(model=MODEL, messages=ASK, response_format=form, max_tokens=120)
    validate(json.loads(str(answer.choices[0].message.content)), SCHEMA)
    assert ai.responses.create(model=MODEL, input="Hello", max_output_tokens=8).output_text
    assert len(ai.embeddings.create(model=MODEL, input="Hello").data[0].embedding) == 576


def test_anthropics_client(url: str) -> None:
    from anthropic import Anthropic

    with Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=120) as claude:
        with claude.messages.stream(model=MODEL, messages=ASK, max_tokens=24, extra_body={"temperature": 0}) as stream:
            text = "".join(stream.text_stream)
        assert "Paris" in text
        assert claude.messages.count_tokens(model=MODEL, messages=ASK).input_tokens > 20


def test_a_small_crowd_leaves_nothing_behind(url: str) -> None:
    """Some clients read slowly, so the server has to wait; `python -m benchmarks crowd` has a thousand clients."""
    at = urlsplit(url)
    arguments = [str(at.hostname), str(at.port), "60", "8", KEY]
    ends = subprocess.run(
        [sys.executable, "-m", "benchmarks.serving.clients", *arguments],
        capture_output=True, text=True, timeout=200, check=True, cwd=ROOT,
    )  # fmt: skip
    assert json.loads(ends.stdout) == {"done": 60}

    def left() -> tuple[int, int, int]:
        """Return the numbers of running and waiting requests, and of pages in use."""
        house = httpx.get(f"{url}/house", headers={"x-api-key": KEY}, timeout=60).json()
        return house["running"], house["waiting"], house["pages"]["held"]

    until(lambda: left() == (0, 0, 0), 60)  # the last client has its answer a moment before the server is done


def test_a_host_open_to_the_network_needs_a_key(tmp_path: Path) -> None:
    done = subprocess.run(
        [*TPI, "serve", "-m", "none", "--host", "0.0.0.0"],
        capture_output=True, text=True, timeout=60, env=clean(tmp_path), check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "set a key with --api-key" in done.stderr


def test_strangers_get_nothing(url: str) -> None:
    assert httpx.get(f"{url}/v1/models", timeout=60).status_code == 401
    assert httpx.get(f"{url}/health", timeout=60).json() == {"status": "ok"}

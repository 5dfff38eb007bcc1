"""Drafts change none of eight answers at once, in either form: tool calls, schemas, stop texts, penalties."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from master.generation.batcher import Batcher, Work
from master.generation.speculation.pace import ROWS, Gain, Pace
from tests.support.models import make_model
from tests.support.serving import Served, client, tiny_server
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack

LAYERS = 12
KINDS = {"type": "string", "enum": ["the first of two kinds", "the second of two kinds"]}
SCHEMA = {
    "type": "object",
    "properties": {"age_in_years": {"type": "integer", "minimum": 0, "maximum": 99}, "kind_of_thing": KINDS},
    "required": ["age_in_years", "kind_of_thing"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look_up", "look_down")]
CALL: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "look_down"}}
MORE: list[dict[str, Any]] = [
    CALL | {"temperature": 0, "parallel_tool_calls": False},
    CALL | {"temperature": 1.2, "seed": 3},
    {"tools": TOOLS, "tool_choice": NAMED, "temperature": 0.8, "seed": 4, "logit_bias": {"70": 5}},
    {"response_format": FORM, "temperature": 1.0, "seed": 5, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0, "logprobs": True},
    {"temperature": 0.7, "seed": 6, "frequency_penalty": 0.5, "presence_penalty": 0.3, "logprobs": True},
    {"temperature": 0, "stop": ["e", "th"]},
    {"temperature": 0, "tools": TOOLS},
]


@pytest.fixture(scope="module", params=[1, LAYERS])
def staged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, bool]]:
    """Return a server with one stage or with one layer a stage, and whether drafts can be steps of their own."""
    directory = tmp_path_factory.mktemp("staged")
    pack_model(open_source(make_model("llama", directory / "model", layers=LAYERS).directory), "q4", directory / "pack")
    # steps of at most ROWS tokens: only then a token has the same bits whatever else is in its step
    options: dict[str, Any] = {"key": None, "context": 1280, "chunk": ROWS, "stages": request.param}
    with tiny_server(Pack.open(directory / "pack"), directory, **options) as served:
        yield served, request.param > 1


def asked(http: httpx.Client) -> list[dict[str, Any]]:
    """Return the answers to eight requests at once, without ids, times, and counts of drafts and cached tokens."""

    def ask(number: int) -> dict[str, Any]:
        message = {"role": "user", "content": f"Go {number}. " + "Say it again. " * 3}
        body = {"messages": [message], "max_tokens": 200, **MORE[number]}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        choice, usage = answer.json()["choices"][0], answer.json()["usage"]
        for call in choice["message"].get("tool_calls") or ():
            del call["id"]
        return {"choice": choice, "usage": {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}}

    with ThreadPoolExecutor(len(MORE)) as pool:
        return list(pool.map(ask, range(len(MORE))))


def test_drafts_change_no_answer(staged: tuple[Served, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    served, ahead = staged
    monkeypatch.setattr(Pace, "drafts", property(lambda pace: True))
    monkeypatch.setattr(Gain, "off", property(lambda gain: False))
    monkeypatch.setattr(Pace, "rows", lambda pace, plain, chances: min(len(chances), ROWS - plain))
    monkeypatch.setattr(Pace, "runs_ahead", lambda *_: ahead)
    monkeypatch.setattr(Pace, "most_ahead", lambda pace, most: most)
    forms, start = set[bool](), Batcher.start

    def noted(batcher: Batcher, work: list[Work]) -> None:
        forms.update(item.guess is not None for item in work if item.guess is not None or item.drafted)
        start(batcher, work)

    monkeypatch.setattr(Batcher, "start", noted)
    with client(served, None) as http:
        monkeypatch.setattr(served.engine, "drafts", False)
        plain = asked(http)
        monkeypatch.setattr(served.engine, "drafts", True)
        assert asked(http) == plain
    assert forms == {ahead}
    assert served.engine.speculation.accepted["grammar"] > 0
    assert served.engine.speculation.accepted["lookup"] > 0
    reasons = [each["choice"]["finish_reason"] for each in plain]
    assert reasons[:4] == ["tool_calls", "tool_calls", "tool_calls", "stop"]

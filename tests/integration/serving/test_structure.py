"""An answer with a schema parses and validates, although this model's text is random."""

import json
import re
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from master.generation.speculation.pace import Pace
from tests.support.answer_schemas import SCHEMAS
from tests.support.serving import Served

MOST = 500  # tokens of an answer, which is short in a bounded schema


def test_there_are_fifty() -> None:
    assert len(SCHEMAS) >= 50
    assert len({json.dumps(schema) for schema in SCHEMAS}) == len(SCHEMAS)


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_an_answer_of_a_schema_validates(number: int, http: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[number]}}
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Go"}],
        "max_tokens": MOST,
        "response_format": form,
    }
    for seed in range(3):
        answer = http.post("/v1/chat/completions", json=body | {"seed": seed, "temperature": 1.2})
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "stop", choice
        Draft202012Validator(SCHEMAS[number]).validate(json.loads(choice["message"]["content"]))


SMALL = [number for number, schema in enumerate(SCHEMAS) if len(json.dumps(schema)) < 250]  # they are told to the model


@pytest.mark.parametrize("number", [*SMALL[::4], SMALL[-1], SMALL[-2]])
def test_the_arguments_of_a_tool_validate(number: int, http: httpx.Client) -> None:
    """Use schemas with and without references. Each is a part of the grammar of the call."""
    schema = {"type": "object", "properties": {"x": SCHEMAS[number]}, "required": ["x"], "additionalProperties": False}
    schema |= {name: SCHEMAS[number][name] for name in ("$defs", "definitions") if name in SCHEMAS[number]}
    tool = {"type": "function", "function": {"name": "use", "parameters": schema}}
    body = {"messages": [{"role": "user", "content": "Go"}], "max_tokens": MOST, "tools": [tool], "seed": 1}
    answer = http.post("/v1/chat/completions", json=body | {"tool_choice": "required", "parallel_tool_calls": False})
    assert answer.status_code == 200, answer.text
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    Draft202012Validator(schema).validate(json.loads(call["function"]["arguments"]))


OBJECTS = [number for number, schema in enumerate(SCHEMAS) if schema.get("required")]  # names are forced


@pytest.mark.parametrize("number", OBJECTS[::9])
def test_drafts_of_a_grammar_change_no_answer(
    number: int, http: httpx.Client, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "drafts", property(lambda pace: True))
    monkeypatch.setattr(Pace, "rows", lambda pace, plain, chances: min(len(chances), 12))
    body = {
        "messages": [{"role": "user", "content": "Go"}], "max_tokens": MOST, "seed": 4, "logprobs": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[number]}},
    }  # fmt: skip
    http.post("/v1/chat/completions", json=body)  # its prompt is then reused by both
    monkeypatch.setattr(served.engine, "drafts", False)
    plain = http.post("/v1/chat/completions", json=body).json()
    monkeypatch.setattr(served.engine, "drafts", True)
    drafted = http.post("/v1/chat/completions", json=body).json()
    assert drafted["choices"] == plain["choices"]
    counts = [each["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] for each in (plain, drafted)]
    assert counts[0] == 0
    assert counts[1] > 0
    assert plain["timings"]["draft_n"] == 0
    assert drafted["timings"]["draft_n"] >= drafted["timings"]["draft_n_accepted"] == counts[1]
    counted = http.get("/metrics").text
    assert re.search(r'vllm:spec_decode_num_accepted_tokens_total\{model_name="[^"]+"\} [1-9]', counted)

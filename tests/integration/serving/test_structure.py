"""An answer of a schema parses and validates, whatever the model would have said; this one talks nonsense."""

import json
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from tests.support.answer_schemas import SCHEMAS

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
    """Whatever its schema refers to: it stands inside the grammar of the call."""
    schema = {"type": "object", "properties": {"x": SCHEMAS[number]}, "required": ["x"], "additionalProperties": False}
    schema |= {name: SCHEMAS[number][name] for name in ("$defs", "definitions") if name in SCHEMAS[number]}
    tool = {"type": "function", "function": {"name": "use", "parameters": schema}}
    body = {"messages": [{"role": "user", "content": "Go"}], "max_tokens": MOST, "tools": [tool], "seed": 1}
    answer = http.post("/v1/chat/completions", json=body | {"tool_choice": "required", "parallel_tool_calls": False})
    assert answer.status_code == 200, answer.text
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    Draft202012Validator(schema).validate(json.loads(call["function"]["arguments"]))

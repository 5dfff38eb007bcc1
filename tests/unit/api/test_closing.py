"""Objects of a schema have only the properties that the schema names, unless it allows others."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from master.api.answers import grammars
from master.api.answers.closing import close_objects
from tests.support.models import write_tokenizer

S: dict[str, Any] = {"type": "string"}
A: dict[str, Any] = {"type": "object", "properties": {"a": S}}
B: dict[str, Any] = {"type": "object", "properties": {"b": S}}
BASE: dict[str, Any] = {"$ref": "#/$defs/base"}
UNION: dict[str, Any] = {"anyOf": [A, {"$ref": "#/$defs/other"}]}
DEFS: dict[str, Any] = {"base": A, "other": B, "union": UNION}

# schema, what it allows, what it does not
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "plain": (A, [{"a": "x"}, {}], [{"z": 1}, {"a": "x", "z": 1}]),
    "without a type": ({"properties": {"a": S}}, [{"a": "x"}], [{"a": "x", "z": 1}, 5]),
    "of no properties": ({"type": "object", "properties": {}}, [{}], [{"z": 1}]),
    "that names none": ({"type": "object"}, [{}, {"z": 1}], [5]),
    "that says that it is open": ({**A, "additionalProperties": True}, [{"a": "x", "z": 1}], []),
    "of other values": ({**A, "additionalProperties": S}, [{"a": "x", "z": "y"}], [{"z": 1}]),
    "in a property": ({"type": "object", "properties": {"o": A}}, [{"o": {"a": "x"}}], [{"o": {"z": 1}}]),
    "in an open object": ({"type": "object", "additionalProperties": A}, [{"o": {"a": "x"}}], [{"o": {"z": 1}}]),
    "in an array": ({"type": "array", "items": A}, [[{"a": "x"}]], [[{"z": 1}]]),
    "in a tuple": ({"type": "array", "prefixItems": [A], "items": False}, [[{"a": "x"}]], [[{"z": 1}]]),
    "of a union": ({"anyOf": [A, B]}, [{"a": "x"}, {"b": "x"}], [{"z": 1}, {"a": "x", "b": "x"}]),
    "of allOf": ({"allOf": [A, B]}, [{"a": "x", "b": "x"}], [{"z": 1}]),
    "of a definition": ({"$defs": DEFS, "type": "array", "items": BASE}, [[{"a": "x"}]], [[{"z": 1}]]),
    "of a definition with more": (
        {"$defs": DEFS, "allOf": [BASE], "properties": {"b": S}},
        [{"a": "x", "b": "x"}],
        [{"z": 1}],
    ),
    "of a definition, alone and with more": (
        {"$defs": DEFS, "type": "object", "properties": {"one": BASE, "two": {"allOf": [BASE, B]}}},
        [{"one": {"a": "x"}, "two": {"a": "x", "b": "x"}}],
        [{"one": {"z": 1}}, {"two": {"z": 1}}, {"one": {"a": "x", "b": "x"}}],
    ),
    "of a union that is a part": (
        {"$defs": DEFS, "allOf": [{"$ref": "#/$defs/union"}], "properties": {"c": S}},
        [{"b": "x", "c": "x"}],
        [{"z": 1}],
    ),
    "refined by a union": (
        {"type": "object", "properties": {"k": S, "x": S}, "anyOf": [{"required": ["k"]}, {"properties": {"k": S}}]},
        [{"k": "1", "x": "2"}],
        [{"z": 1}],
    ),
    "that needs what it does not describe": ({**A, "required": ["b"]}, [{"a": "x", "b": 5}], [{"b": 5, "z": 1}]),
    "with formats of OpenAPI": (
        {"properties": {"a": {"type": "integer", "format": "int64"}, "format": {**S, "format": "password"}}},
        [{"a": 5, "format": "x"}],
        [{"a": "x"}],
    ),
    "that is recursive": (
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        [{"next": {"next": {}}}],
        [{"next": {"z": 1}}],
    ),
    "in the order of the schema": (
        {"type": "object", "properties": {"why": S, "answer": S}, "required": ["answer", "why"]},
        [{"why": "x", "answer": "y"}],
        [{"answer": "y", "why": "x"}],
    ),
    "of parts in the order of the schema": (
        {"allOf": [{"required": ["b", "a"]}, {"properties": {"z": S, "a": S}}, {"properties": {"b": S}}]},
        [{"z": "1", "a": "2", "b": "3"}],
        [{"a": "2", "b": "3"} | {"z": "1"}, {"b": "3", "a": "2"}],
    ),
    "or null": ({"anyOf": [A, {"type": "null"}]}, [None, {"a": "x"}], [{"z": 1}]),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return LLTokenizer((directory / "tokenizer.json").read_text())


def allows(tokenizer: LLTokenizer, lark: str, value: Any) -> bool:
    matcher = LLMatcher(tokenizer, grammar_from("lark", f"start: answer\n{lark}"), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(json.dumps(value))
    return bool(
        matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()
    )


@pytest.mark.parametrize("case", CASES)
def test_an_object_has_the_properties_that_are_named(case: str, tokenizer: LLTokenizer) -> None:
    schema, good, bad = CASES[case]
    lark = grammars.of_schema(schema)
    assert [value for value in good if not allows(tokenizer, lark, value)] == []
    assert [value for value in bad if allows(tokenizer, lark, value)] == []


def test_names_that_look_like_keywords_and_data_stay(tokenizer: LLTokenizer) -> None:
    data = {"type": "object", "properties": {"a": {"const": A}, "properties": {"enum": [A]}}}
    found = close_objects(data)
    assert found == {**data, "additionalProperties": False}
    assert close_objects(True) is True
    assert close_objects({**A, "$ref": "elsewhere.json"}) == {**A, "$ref": "elsewhere.json"}


def test_arguments_are_an_object(tokenizer: LLTokenizer) -> None:
    for parameters in (None, {}, {"properties": {"a": S}}, {"type": ["object", "null"]}, {"anyOf": [A, S]}):
        lark = f"answer: %json {json.dumps(grammars.arguments_of({'name': 'f', 'parameters': parameters}))}"
        assert not allows(tokenizer, lark, None)
        assert not allows(tokenizer, lark, "x")
        assert allows(tokenizer, lark, {"a": "x"})


@pytest.mark.timeout(60)
def test_a_schema_of_references_that_double_takes_no_time() -> None:
    defs = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(2000)}
    schema = {"$defs": {**defs, "d2000": A}, "properties": {f"p{n}": {"$ref": "#/$defs/d0"} for n in range(2000)}}
    assert close_objects(schema)["additionalProperties"] is False

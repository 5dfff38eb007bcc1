"""Grammars, in llguidance's Lark, of what a client wants: JSON, JSON of a schema, text of a pattern, tool calls."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from master.api.tools.families import ToolFamily

ANY_OBJECT: dict[str, Any] = {"type": "object"}
_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # small models love white space

Literal = Callable[[str], str]
"""How the grammar writes a text that control tokens may be part of."""


def of_schema(schema: Any) -> str:
    """`answer` is JSON of `schema`."""
    return f"answer: %json {_json(schema)}"


def of_pattern(pattern: str) -> str:
    """`answer` matches the regular expression `pattern` as a whole."""
    return f"answer: PATTERN\nPATTERN: /{_slashed(pattern)}/"


def of_calls(family: ToolFamily, tools: Sequence[dict[str, Any]], several: bool, literal: Literal) -> str:
    """`answer` is one call of one of `tools` (name and parameters), or with `several` one or more."""
    definitions = {
        f"tool{index}": _moved(tool.get("parameters") or ANY_OBJECT, index) for index, tool in enumerate(tools)
    }
    calls = [_call_schema(tool["name"], family.arguments, index) for index, tool in enumerate(tools)]
    schema: dict[str, Any] = {"anyOf": calls, "$defs": definitions}
    if family.name == "function":
        options = [_function(tool) for tool in tools]
        return "\n".join([f"answer: {' | '.join(f'f{index}' for index in range(len(options)))}", *_named(options)])
    if family.array:
        most = {} if several else {"maxItems": 1}
        array = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most, "$defs": definitions}
        return f"answer: {literal(family.opening)} call\ncall: %json {_json(array)}"
    parts = [literal(text) for text in (family.opening, family.closing) if text]
    one = " ".join([*parts[:1], "call", *parts[1:]])
    more = f' ("\\n" {one})*' if several and family.closing else ""
    return f"answer: {one}{more}\ncall: %json {_json(schema)}"


def whole(answer: str, thinking: tuple[str, str] | None, begun: bool, literal: Literal) -> str:
    """The grammar of a whole output: `answer`, after what the model may think before it; `begun` in the prompt."""
    if thinking is None:
        return f"start: answer\n{answer}"
    opening, closing = map(literal, thinking)
    if closing.startswith("<["):
        thought = f"thought: ANYTHING {closing}\nANYTHING: /(.|\\n)*/"  # a control token ends any text
    else:
        thought = f"thought[lazy]: /(.|\\n)*{_slashed(thinking[1])}/"
    thinks = "thought WHITE answer" if begun else f"({opening} thought WHITE)? answer"
    return f"start: {thinks}\n{thought}\nWHITE: /\\n{{0,2}}/\n{answer}"


def literal_of(control: Callable[[str], int | None]) -> Literal:
    """Texts as they are, but the markers that `control` knows as control tokens by their numbers."""

    def write(text: str) -> str:
        token = control(text.strip())
        if token is None:
            return json.dumps(text)
        after = text[len(text.rstrip()) :]
        before = text[: len(text) - len(text.lstrip())]
        return " ".join(part for part in (_quoted(before), f"<[{token}]>", _quoted(after)) if part)

    return write


def _json(schema: Any) -> str:
    """A schema with how it is to be written, if it can say so."""
    return json.dumps({**schema, "x-guidance": _SPACED} if isinstance(schema, dict) else schema)


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _call_schema(name: str, arguments: str, index: int) -> dict[str, Any]:
    properties = {"name": {"const": name}, arguments: {"$ref": f"#/$defs/tool{index}"}}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _moved(schema: Any, index: int) -> Any:
    """A schema whose references are right where it stands now: below the definition of tool `index`."""
    if isinstance(schema, dict):
        moved = {key: _moved(value, index) for key, value in schema.items()}
        if isinstance(ref := schema.get("$ref"), str) and ref.startswith("#"):
            moved["$ref"] = f"#/$defs/tool{index}{ref[1:]}"
        return moved
    return [_moved(value, index) for value in schema] if isinstance(schema, list) else schema


def _function(tool: dict[str, Any]) -> str:
    """`<function=NAME>{...}</function>`."""
    name = json.dumps(f"<function={tool['name']}>")
    return f'{name} %json {_json(tool.get("parameters") or ANY_OBJECT)} "</function>"'


def _named(options: Sequence[str]) -> list[str]:
    return [f"f{index}: {option}" for index, option in enumerate(options)]


def _slashed(pattern: str) -> str:
    """With its slashes escaped, as Lark's delimiters want them."""
    escaped, out = False, []
    for character in pattern:
        out.append("\\/" if character == "/" and not escaped else character.replace("\n", "\\n"))
        escaped = character == "\\" and not escaped
    return "".join(out)

"""Grammars in llguidance's Lark for JSON, JSON of a schema, text that matches a pattern, and tool calls.

Each function returns rules; `answer` is the rule for the answer, and `whole` adds the start rule.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from master.api.answers.closing import close_objects
from master.api.answers.learnt_calls import LearntCalls
from master.api.tools.families import ToolFamily
from master.text.channels import CHANNEL, ENDS, KIND, MESSAGE, START, TOOL

ANY_OBJECT: dict[str, Any] = {"type": "object"}
_SPACED = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}  # small models tend to write endless white space
_LIKE_A_CALL = (
    r"\s*(<\|python_tag\|>|<\|tool_call\|>|functools|```(json)?)?\s*[{\[](.|\n)*"  # see `master.api.tools.bare`
)

Literal = Callable[[str], str]
"""Function that writes a text in the grammar's syntax, with control tokens written as their numbers."""


def of_schema(schema: Any) -> str:
    """Return a grammar of JSON that matches `schema`.

    Objects have only the properties that the schema names, unless it allows others.
    """
    return f"answer: %json {_json(close_objects(schema))}"


def arguments_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments: an object, closed unless the tool allows further properties."""
    parameters = tool.get("parameters") or ANY_OBJECT
    kind = parameters.get("type", "object")
    known = isinstance(kind, list) and "object" in kind
    found: dict[str, Any] = close_objects({**parameters, "type": "object" if known else kind})
    return found


def of_pattern(pattern: str) -> str:
    """Return a grammar of text that matches the whole regular expression `pattern`."""
    return f"answer: PATTERN\nPATTERN: /{_slashed(pattern)}/"


def of_calls(family: ToolFamily, tools: Sequence[dict[str, Any]], several: bool, literal: Literal) -> str:
    """Return a grammar of one call of one of `tools` (name and parameters) or, with `several`, of one or more calls."""
    return f"answer: {literal(family.marker)} tail\n{_tail(family, tools, several, literal)}"


def of_text_and_calls(family: ToolFamily, tools: Sequence[dict[str, Any]], several: bool, literal: Literal) -> str:
    """Return a grammar of any text in which everything that begins like a call is a complete call of one of `tools`."""
    tail = _tail(family, tools, several, literal)
    if not family.marker:  # the whole answer is a call, or a text that the parser does not take for one
        return f"answer: tail | WORDS\nWORDS: /(.|\\n)*/ & ~/{_LIKE_A_CALL}/\n{tail}"
    opening, rest = _divided(literal(family.marker))
    head = "head" if opening.startswith("<[") else "head[lazy]"  # a control token ends any text
    return f"answer: (head {rest} tail)* WORDS\n{head}: WORDS {opening}\nWORDS: /(.|\\n)*/\n{tail}"


def of_channels(tools: Sequence[dict[str, Any]], literal: Literal) -> str:
    """Return a grammar of messages in channels (`master.text.channels`); messages to a function call one of `tools`."""
    channel, message, end, start, kind = map(literal, (CHANNEL, MESSAGE, ENDS[0], START, KIND))
    calls = []
    for index, tool in enumerate(tools):
        to, schema = json.dumps(f" to={TOOL}{tool['name']}"), _json(arguments_of(tool))
        calls.append(f"f{index}: ({to} {channel} OTHER | {channel} OTHER {to}) type? {message} json{index}")
        calls.append(f"json{index}: %json {schema}")
    return "\n".join([
        f'answer: (said {end} {start} "assistant")* (said | {" | ".join(f"f{index}" for index in range(len(tools)))})',
        f"said: {channel} NAME {message} WORDS",
        f'type: " "? {kind} "json" | " json"',
        'OTHER: "commentary"',
        "NAME: /[a-z]+/",
        "WORDS: /(.|\\n)*/",
        *calls,
    ])  # fmt: skip


def either(calls: str, said: str) -> str:
    """Return a grammar of an answer that matches one of two grammars."""
    renamed = [f"{name}{grammar.removeprefix('answer')}" for name, grammar in (("calls", calls), ("said", said))]
    return "\n".join(["answer: calls | said", *renamed])


def whole(answer: str, thinking: tuple[str, str] | None, begun: bool, literal: Literal) -> str:
    """Return the grammar of a complete output: the reasoning, if the model has tags for it, then the answer.

    `begun` is True if the prompt already ends with the opening tag. `literal` is a function from `literal_of`.
    """
    if thinking is None:
        return f"start: answer\n{answer}"
    opening = literal(thinking[0])
    thought = _until("thought", thinking[1], literal)
    thinks = "thought WHITE answer" if begun else f"({opening} thought WHITE)? answer"
    return f"start: {thinks}\n{thought}\nWHITE: /\\n{{0,2}}/\n{answer}"


def literal_of(control: Callable[[str], int | None]) -> Literal:
    """Return a function that writes a text as a quoted string, or as a number if `control` returns its token id."""

    def write(text: str) -> str:
        parts = []
        for between, tag in re.findall(r"((?:[^<\[]|\n)*)(<[^<>]*>|\[[^\[\]]*\]|[<\[]|$)", text):
            token = control(tag) if tag else None
            parts += [between, tag] if token is None else [between, token]
        return " ".join(f"<[{part}]>" if isinstance(part, int) else _quoted(part) for part in _merged(parts))

    return write


def _merged(parts: Sequence[str | int]) -> list[str | int]:
    found: list[str | int] = []
    for part in parts:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        elif part != "":
            found.append(part)
    return found


def _divided(literal: str) -> tuple[str, str]:
    """Split a text in the grammar's syntax after its first string or control token; return both parts."""
    first = re.match(r'"(?:[^"\\]|\\.)*"|<\[\d+\]>', literal)
    assert first
    return first[0], literal[first.end() :]


def _until(rule: str, mark: str, literal: Literal) -> str:
    """Return a rule of any text up to and including `mark`."""
    ending = literal(mark)
    if re.search(r"<\[\d+\]>", ending):  # a control token ends any text
        return f"{rule}: {rule.upper()} {ending}\n{rule.upper()}: /(.|\\n)*/"
    escaped = re.sub(r"([.^$*+?()\[\]{}|\\])", r"\\\1", mark)
    return f"{rule}[lazy]: /(.|\\n)*{_slashed(escaped)}/"


def _json(schema: Any) -> str:
    """Return a schema as JSON. If it is a dict, add llguidance's option that determines the white space."""
    return json.dumps({**schema, "x-guidance": _SPACED} if isinstance(schema, dict) else schema)


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _tail(family: ToolFamily, tools: Sequence[dict[str, Any]], several: bool, literal: Literal) -> str:
    """Return the rule `tail` for the calls of an answer after their first marker."""
    calls = LearntCalls(family.marks, literal, _json, lambda rule, mark: _until(rule, mark, literal))
    return calls.tail(family.marker, [(tool["name"], arguments_of(tool)) for tool in tools], several)


def _slashed(pattern: str) -> str:
    """Return a regular expression escaped for Lark, where slashes delimit it.

    Its slashes are escaped. Its quotes are spelled by their code, so that only strings have quotes in a grammar.
    """
    escaped, out = False, []
    for character in pattern:
        spelled = {"/": "/" if escaped else "\\/", '"': "x22" if escaped else "\\x22", "\n": "\\n"}
        out.append(spelled.get(character, character))
        escaped = character == "\\" and not escaped
    return "".join(out)

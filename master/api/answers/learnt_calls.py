"""Grammars of calls between learnt marks (`master.text.templates.calls`), in llguidance's Lark."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from master.text.templates.calls import ANY, KEY, CallMarks

Tool = tuple[str, Mapping[str, Any]]
"""The name of a tool and the schema of its arguments."""

_ID = "ID: /[A-Za-z0-9_.:-]+/"
_FREE_KEY = "NAME: /[A-Za-z0-9_.-]+/"


class LearntCalls:
    """Writes the rules of calls of some tools.

    `literal` quotes a text, `json` writes a schema, and `until` writes the rule of any text up to a mark.
    """

    def __init__(
        self,
        marks: CallMarks,
        literal: Callable[[str], str],
        json: Callable[[Any], str],
        until: Callable[[str, str], str],
    ) -> None:
        self._marks, self._write, self._json, self._until = marks, literal, json, until
        self._rules = [_ID, _FREE_KEY]

    def tail(self, marker: str, tools: Sequence[Tool], several: bool) -> str:
        """Return the rule `tail` for what follows `marker`: a call, or with `several` one or more calls."""
        marks = self._marks
        head = (marks.section + marks.opening).lstrip()
        ends = [self._literal(text) for text in (marks.closing, marks.section_end)]
        for index, tool in enumerate(tools):
            self._rules.append(f"f{index}: {self._call(index, tool, several)}")
        one = f"({' | '.join(f'f{index}' for index in range(len(tools)))}) {ends[0]}"
        more = ""
        if several and not marks.array:
            following = self._literal(marks.separator + (marks.opening if marks.section else marks.opening.lstrip()))
            more = f"({following} {one})*" if following else ""
        first = self._literal(head[len(marker) :])
        return "\n".join([f"tail: {first} {one} {more} {ends[1]}", *self._rules])

    def _call(self, index: int, tool: Tool, several: bool) -> str:
        name, schema = tool
        marks = self._marks
        if marks.kind == "object":
            fields = (
                {marks.name_key: {"const": name}, marks.arguments_key: schema} if marks.name_key else {name: schema}
            )
            definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
            call = {
                "type": "object", "properties": fields, "required": list(fields), "additionalProperties": False,
            }  # fmt: skip
            if not marks.array:
                return f"%json {self._json({**call, **definitions})}"
            array = {"type": "array", "items": call, "minItems": 1, **({} if several else {"maxItems": 1})}
            return f"%json {self._json({**array, **definitions})}"
        begin = f"{self._literal(name)} {self._literal(marks.name_end)}"
        if marks.kind == "json":
            return f"{begin} %json {self._json(schema)}"
        return f"{begin} {self._arguments(index, schema)}"

    def _arguments(self, index: int, schema: Mapping[str, Any]) -> str:
        """Return an expression for arguments: those that are required, then the others, each in the schema's order."""
        marks, properties = self._marks, schema.get("properties")
        between = self._literal(marks.between)
        if not isinstance(properties, Mapping) or (not properties and schema.get("additionalProperties") is not False):
            one = (
                f"{self._literal(marks.key_open)} NAME {self._literal(marks.key_end.replace(ANY, 'false'))} free{index}"
            )
            self._rules.append(self._value(f"free{index}", {}, schema, ""))
            return f"({one} ({between} {one})*)?"
        required = [key for key in properties if key in (schema.get("required") or ())]
        others = [key for key in properties if key not in required]
        spelled = dict(self._properties(index, properties, schema))
        said = f" {between} ".join(spelled[key] for key in required)
        if required:
            return said + "".join(f" ({between} {spelled[key]})?" for key in others)
        rest = [
            spelled[key] + "".join(f" ({between} {spelled[later]})?" for later in others[place + 1 :])
            for place, key in enumerate(others)
        ]
        return f"({' | '.join(rest)})?" if rest else ""

    def _properties(
        self, index: int, properties: Mapping[str, Any], schema: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        """Yield each key and the expression for its argument."""
        marks = self._marks
        for place, (key, kind) in enumerate(properties.items()):
            rule = f"v{index}x{place}"
            text = isinstance(kind, Mapping) and kind.get("type") == "string"
            end = marks.string_end if text else marks.key_end.replace(ANY, "false")
            self._rules.append(self._value(rule, kind, schema, key))
            yield key, f"{self._literal(marks.key_open + key + end)} {rule}"

    def _value(self, rule: str, kind: Any, schema: Mapping[str, Any], key: str) -> str:
        """Return the rule for a value and the mark after it."""
        marks = self._marks
        end = marks.value_end.replace(KEY, key)
        known = kind if isinstance(kind, Mapping) else {}
        if known.get("type") == "string" and isinstance(known.get("enum"), list) and known["enum"]:
            said = " | ".join(self._literal(marks.quote + str(one) + marks.quote) for one in known["enum"])
            return f"{rule}: ({said}) {self._literal(end)}"
        if marks.kind == "tags" and (known.get("type") == "string" or not known):
            return self._until(rule, end)
        if marks.kind == "values" and known.get("type") == "string" and marks.quote not in ("'", '"'):
            return f"{rule}: {self._literal(marks.quote)} {rule}s {self._literal(end)}\n" + self._until(
                f"{rule}s", marks.quote
            )
        definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
        return f"{rule}: %json {self._json({**known, **definitions})} {self._literal(end)}"

    def _literal(self, text: str) -> str:
        """Return a text in the grammar's syntax; an id may be any word."""
        parts = [self._write(part) if part else "" for part in text.split(ANY)]
        return " ID ".join(parts).strip() if text else ""

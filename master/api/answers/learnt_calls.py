"""Grammars of calls between learnt marks (`master.text.templates.calls`), in llguidance's Lark."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from master.text.templates.calls import ANY, KEY, CallMarks

Tool = tuple[str, Mapping[str, Any]]
"""The name of a tool and the schema of its arguments."""

_ID_PATTERN = "^[A-Za-z0-9_.:-]{1,32}$"
_ID = "ID: /[A-Za-z0-9_.:-]{1,32}/"
_FREE_KEY = "NAME: /[A-Za-z0-9_.-]+/"


class LearntCalls:
    """Writer of grammar rules for calls of tools whose syntax is described by `CallMarks`.

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
        closing, section_end = self._literal(marks.closing), self._literal(marks.section_end)
        if marks.kind == "object":
            self._rules.append(f"call: %json {self._json(self._objects(tools, several))}")
        else:
            self._rules.append(f"call: {' | '.join(f'f{index}' for index in range(len(tools)))}")
            self._rules += [f"f{index}: {self._call(index, *tool)}" for index, tool in enumerate(tools)]
        following = self._literal(marks.separator + marks.opening) if several and not marks.array else ""
        more = f"({following} call {closing})*" if following else ""
        first = self._literal((marks.section + marks.opening).lstrip()[len(marker) :])
        return "\n".join([f"tail: {first} call {closing} {more} {section_end}", *self._rules])

    def _objects(self, tools: Sequence[Tool], several: bool) -> dict[str, Any]:
        """Return the schema of a call as one object; with `several`, of the array of all calls."""
        name_key, arguments_key = self._marks.name_key, self._marks.arguments_key
        before = {self._marks.id_key: {"type": "string", "pattern": _ID_PATTERN}} if self._marks.id_key else {}
        calls, definitions = list[Any](), dict[str, Any]()
        for index, (name, schema) in enumerate(tools):
            given = {"$ref": f"#/$defs/tool{index}"}
            definitions[f"tool{index}"] = moved(schema, given["$ref"])
            fields = {**before, name_key: {"const": name}, arguments_key: given} if name_key else {name: given}
            calls.append(
                {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
            )
        most = {} if several else {"maxItems": 1}
        array = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most}
        return {**(array if self._marks.array else {"anyOf": calls}), "$defs": definitions}

    def _call(self, index: int, name: str, schema: Mapping[str, Any]) -> str:
        """Return the grammar's expression for a call, from the tool's name to the last argument."""
        begin = f"{self._literal(name)} {self._literal(self._marks.name_end)}"
        if self._marks.kind == "json":
            return f"{begin} %json {self._json(schema)}"
        return f"{begin} {self._arguments(index, schema)}"

    def _arguments(self, index: int, schema: Mapping[str, Any]) -> str:
        """Return the grammar's expression for the arguments: required ones, then optional ones, each in the schema's
        order.
        """
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
        """Yield each argument's name, and the grammar's expression for the argument."""
        marks = self._marks
        for place, (key, kind) in enumerate(properties.items()):
            rule = f"v{index}x{place}"
            text = isinstance(kind, Mapping) and kind.get("type") == "string"
            end = marks.string_end if text else marks.key_end.replace(ANY, "false")
            self._rules.append(self._value(rule, kind, schema, key))
            yield key, f"{self._literal(marks.key_open + key + end)} {rule}"

    def _value(self, rule: str, kind: Any, schema: Mapping[str, Any], key: str) -> str:
        """Return the rule named `rule`, for the value of the argument `key` and the mark after it.

        `kind` is the value's own schema. `schema` is the schema of all arguments, into which its references point.
        """
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
        root = {"$defs": {"tool": moved(schema, "#/$defs/tool")}} if _refers(known) else {}
        return f"{rule}: %json {self._json({**moved(known, '#/$defs/tool'), **root})} {self._literal(end)}"

    def _literal(self, text: str) -> str:
        """Return a text in the grammar's syntax, in which a placeholder for an id matches any word."""
        parts = [self._write(part) if part else "" for part in text.split(ANY)]
        return " ID ".join(parts).strip() if text else ""


def _refers(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        return "$ref" in schema or any(map(_refers, schema.values()))
    return isinstance(schema, list) and any(map(_refers, schema))


def moved(schema: Any, place: str) -> Any:
    """Return a schema with its references adjusted to its new place, such as `#/$defs/tool`."""
    if isinstance(schema, Mapping):
        found = {key: moved(value, place) for key, value in schema.items()}
        if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
            found["$ref"] = place + reference[1:]
        return found
    return [moved(value, place) for value in schema] if isinstance(schema, list) else schema

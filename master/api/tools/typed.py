"""Values of arguments that a model writes without saying their type: raw text, or literals in several dialects."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

_WORDS: Mapping[str, Any] = {"True": True, "False": False, "None": None}
_BARE = re.compile(r"[^\s,:=\[\]{}()<>\"']+")
_KEY = re.compile(r"[^\s,:=\[\]{}()<>\"']+")
_QUOTED = {quote: re.compile(rf"{quote}[^{quote}\\]*(?:\\.[^{quote}\\]*)*{quote}", re.DOTALL) for quote in "\"'"}
_DEPTH = 32  # limit of nested values


class More(Exception):
    """Error for a text that ends before the call or value in it is complete."""


class Never(Exception):
    """Error for a text that cannot become a call, whatever text follows."""


def typed(raw: str, schema: Any, root: Any) -> Any:
    """Return the text `raw` as a value of the type in its JSON `schema`. References in the schema point into `root`."""
    kinds = _kinds(schema, root)
    if kinds == {"string"}:
        return raw
    stripped = raw.strip()
    value = _read(stripped)
    if kinds is None:
        return raw if isinstance(value, str) else value
    if "integer" in kinds and isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if _kind(value) & kinds or ("string" not in kinds and not isinstance(value, str)) else raw


def _read(text: str) -> Any:
    """Return the value of a JSON text or a Python literal; return any other text unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if text in _WORDS:
        return _WORDS[text]
    if text[:1] in ("{", "["):
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            pass
    return text


def _kind(value: Any) -> set[str]:
    """Return the names of the JSON schema types that a value has."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    names = {float: "number", str: "string", list: "array", dict: "object"}
    return {names.get(type(value), "")}


def _kinds(schema: Any, root: Any, depth: int = 0) -> set[str] | None:
    """Return the names of the JSON schema types that a schema allows; None if they are not known."""
    if not isinstance(schema, dict) or depth > _DEPTH:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        found = root
        for part in reference.removeprefix("#").split("/")[1:]:
            found = found.get(part) if isinstance(found, dict) else None
        return _kinds(found, root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, (str, list)):
        return {kind} if isinstance(kind, str) else {one for one in kind if isinstance(one, str)}
    if "const" in schema or isinstance(schema.get("enum"), list):
        allowed = [schema["const"]] if "const" in schema else schema["enum"]
        return set[str]().union(*map(_kind, allowed))
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            each = [_kinds(one, root, depth + 1) for one in schema[word]]
            return None if None in each else set[str]().union(*(one for one in each if one))
    each = [_kinds(one, root, depth + 1) for one in schema.get("allOf") or ()]
    return next((one for one in each if one), None)


class Literals:
    """A reader of literals: JSON's, Python's, and objects with bare keys. Strings may also be in the model's quotes."""

    def __init__(self, quote: str) -> None:
        self._quote = quote

    def value(self, text: str, at: int, depth: int = 0) -> tuple[Any, int]:
        """Return the value that begins at the index `at`, and the index of its end.

        Raises:
            More: if the text ends before the value does.
            Never: if no value can begin there.
        """
        at = _blank(text, at)
        if depth > _DEPTH:
            raise Never
        rest = text[at : at + len(self._quote)]
        if rest == self._quote and self._quote not in ('"', "'"):
            end = text.find(self._quote, at + len(rest))
            if end < 0:
                raise More
            return text[at + len(rest) : end], end + len(rest)
        if self._quote.startswith(rest) and len(rest) < len(self._quote) and rest:
            raise More
        first = text[at]
        if first in "\"'":
            return _string(text, at)
        if first in "{[(":
            return self._many(text, at, depth)
        if not (found := _BARE.match(text, at)):
            raise Never
        if found.end() == len(text):
            raise More
        return _read(found[0]), found.end()

    def _many(self, text: str, at: int, depth: int) -> tuple[Any, int]:
        closing, pairs = {"{": "}", "[": "]", "(": ")"}[text[at]], text[at] == "{"
        values, keys, at = list[Any](), list[str](), at + 1
        while True:
            at = _blank(text, at)
            if text[at] == closing:
                return (dict(zip(keys, values, strict=True)) if pairs else values), at + 1
            if pairs:
                key, at = self._key(text, at, depth)
                keys.append(key)
            value, at = self.value(text, at, depth + 1)
            values.append(value)
            at = _blank(text, at)
            if text[at] == ",":
                at += 1
            elif text[at] != closing:
                raise Never

    def _key(self, text: str, at: int, depth: int) -> tuple[str, int]:
        if text[at] in "\"'" or (self._quote and self._quote[0] == text[at]):
            key, at = self.value(text, at, depth + 1)
        else:
            if not (found := _KEY.match(text, at)):
                raise Never
            key, at = found[0], found.end()
        at = _blank(text, at)
        if text[at] != ":":
            raise Never
        return str(key), at + 1


def _blank(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    if at >= len(text):
        raise More
    return at


def _string(text: str, at: int) -> tuple[str, int]:
    found = _QUOTED[text[at]].match(text, at)
    if found is None:
        raise More
    value = _read_string(found[0])
    return (found[0][1:-1] if value is None else value), found.end()


def _read_string(spelled: str) -> str | None:
    """Return the string that `spelled` quotes in JSON's or Python's syntax; None if `spelled` is no such string."""
    try:
        return str(json.loads(spelled, strict=False))
    except ValueError:
        pass
    try:
        return str(ast.literal_eval(spelled))
    except (ValueError, SyntaxError):
        return None

"""Closing of JSON schemas: an object may have only the properties that its schema names, as in llama.cpp's grammars.

JSON Schema allows any other property, and a small model then tends to invent some. An object schema that names
properties and does not mention `additionalProperties` is therefore closed. A schema that names no properties stays
open.
"""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

_ONE = ("additionalProperties", "additionalItems", "contains", "items", "propertyNames", "unevaluatedItems")
_LISTED = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "patternProperties", "properties")
_PARTS = ("allOf", "anyOf", "oneOf")  # parts that describe the same object
_OPEN = ("additionalProperties", "unevaluatedProperties")
_NOTES = (
    "binary",
    "byte",
    "double",
    "float",
    "int32",
    "int64",
    "password",
)  # formats of OpenAPI that JSON Schema does not have
_MOST_STEPS = 200_000  # limit of subschemas examined in one schema; later objects stay open


def close_objects(schema: Any) -> Any:
    """Return `schema` with each of its objects closed, unless closing would refuse properties that the schema names.

    The properties of one object may be spread over `properties`, `allOf`, `anyOf`, `oneOf` and `$ref`; they count
    together. An object stays open if any of its parts mentions `additionalProperties`. Formats that OpenAPI adds
    are removed: they are notes for a reader and have no grammar.
    """
    return _Closing(schema).result if isinstance(schema, dict) else schema


class _Closing:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._steps = 0
        self._bases = self._found_bases()
        self.result = self._schema(root, "#", part=False)

    def _schema(self, schema: Any, at: str, part: bool) -> Any:
        """Return the schema at the JSON pointer `at`, with objects that allow no other properties than the named ones.

        With `part`, the schema itself stays open, because another one, such as an `allOf`, names further properties of
        the same object.
        """
        if not isinstance(schema, dict):
            return schema
        part, union = part or at in self._bases, _is_union(schema)
        found = {
            key: self._below(key, value, f"{at}/{_escaped(key)}", part or not union)
            for key, value in schema.items()
            if key != "format" or not isinstance(value, str) or value not in _NOTES
        }
        if part or union or not _may_be_object(schema) or self._is_elsewhere(schema):
            return found
        names = self._names(schema)
        if names is None:
            return found
        properties = {**{name: {} for name in names}, **found.get("properties", {})}
        kind = {} if found.get("type") else {"type": "object"}
        return {**kind, **found, "properties": properties, "additionalProperties": False}

    def _below(self, key: str, value: Any, at: str, part: bool) -> Any:
        inner = part and key in _PARTS
        if isinstance(value, list) and key in _LISTED:
            return [self._schema(one, f"{at}/{index}", inner) for index, one in enumerate(value)]
        if isinstance(value, dict) and key in _NAMED:
            return {name: self._schema(one, f"{at}/{_escaped(name)}", False) for name, one in value.items()}
        return self._schema(value, at, False) if key in _ONE else value

    def _is_elsewhere(self, schema: Schema) -> bool:
        """Return True if the schema is only a reference to a definition that is closed where it is defined."""
        ref = schema.get("$ref")
        return ref is not None and not any(key in schema for key in (*_PARTS, "properties")) and ref not in self._bases

    def _found_bases(self) -> set[str]:
        bases, stack = set[str](), [(self._root, False)]
        while stack:
            one, part = stack.pop()
            if isinstance(one, list):
                stack += [(below, part) for below in one]
            if not isinstance(one, dict):
                continue
            ref, inner = one.get("$ref"), part or not _is_union(one)
            if (
                isinstance(ref, str)
                and ref not in bases
                and (part or any(key in one for key in (*_PARTS, "properties")))
            ):
                bases.add(ref)
                stack.append((self._target(ref), True))
            stack += [(below, inner and key in _PARTS) for key, below in one.items()]
        return bases

    def _names(self, schema: Schema) -> list[str] | None:
        """Return the names of all properties of the object.

        Return None if it names none, is open, or cannot be resolved completely.

        The names are in the schema's order, because answers have the same order. Properties that are required but have
        no schema come last.
        """
        described, needed, seen, named = dict[str, None](), dict[str, None](), set[str](), False
        parts: list[Any] = [schema]
        while parts:
            one = parts.pop()
            self._steps += 1
            if not isinstance(one, dict) or not _may_be_object(one):
                continue
            if self._steps > _MOST_STEPS or any(key in one for key in _OPEN):
                return None
            properties, required = one.get("properties"), one.get("required")
            named = named or isinstance(properties, dict) or "patternProperties" in one
            described |= dict.fromkeys(properties if isinstance(properties, dict) else ())
            listed = required if isinstance(required, list) else ()
            needed |= dict.fromkeys(name for name in listed if isinstance(name, str))
            below = [part for key in _PARTS if isinstance(one.get(key), list) for part in one[key]]
            parts += reversed(below)  # the first is looked at next
            if isinstance(ref := one.get("$ref"), str) and ref not in seen:
                seen.add(ref)
                if (target := self._target(ref)) is None:
                    return None
                parts.append(target)
        return list(described | needed) if named else None

    def _target(self, ref: str) -> Any:
        """Return the schema that the reference `ref` points to; None if the root schema does not contain it."""
        first, *words = ref.split("/")
        here: Any = self._root if first == "#" else None
        for word in words:
            name = word.replace("~1", "/").replace("~0", "~")
            if isinstance(here, list):
                here = here[int(name)] if name.isdecimal() and int(name) < len(here) else None
            else:
                here = here.get(name) if isinstance(here, dict) else None
        return here


def _is_union(schema: Schema) -> bool:
    """Return True if the schema is only a choice (`anyOf` or `oneOf`), so that each alternative is closed by itself."""
    own = ("$ref", "allOf", "patternProperties", "properties", "required", *_OPEN)
    return ("anyOf" in schema or "oneOf" in schema) and not any(key in schema for key in own)


def _may_be_object(schema: Schema) -> bool:
    kind = schema.get("type", "object")
    return kind == "object" or (isinstance(kind, list) and "object" in kind)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")

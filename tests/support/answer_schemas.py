"""Fifty schemas of answers: every kind of value, formats, bounds, choices, enumerations, recursion, references."""

from typing import Any

Schema = dict[str, Any]


def object_of(**properties: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def array_of(items: Schema, most: int = 2, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "maxItems": most, "minItems": least}


SHORT: Schema = {"type": "string", "maxLength": 4}
DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
FLAG: Schema = {"type": "boolean"}
WORDS = [f"word-{number}" for number in range(300)]
NODE: Schema = object_of(value=DIGIT, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]})

VALUES: list[Schema] = [
    SHORT,
    DIGIT,
    FLAG,
    {"type": "null"},
    {"type": "integer", "minimum": -5, "maximum": -1},
    {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 12},
    {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 25},
    {"type": "number", "minimum": 0.25, "maximum": 0.75},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "enum": ["a", "b", "c"]},
    {"enum": [1, "one", None, True]},
    {"enum": WORDS},
    {"const": "exactly"},
    {"const": {"nested": [1, 2]}},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 3},
    {"anyOf": [SHORT, DIGIT]},
    {"oneOf": [FLAG, {"type": "null"}]},
]
CONTAINERS: list[Schema] = [
    {"type": "object", "properties": {}, "additionalProperties": False},
    array_of(DIGIT),
    array_of(DIGIT, most=4, least=4),
    array_of({"enum": WORDS}, most=3, least=2),
    array_of(array_of(FLAG)),
    {"type": "array", "prefixItems": [SHORT, DIGIT], "items": False, "minItems": 2},
    {"type": "object", "patternProperties": {"^[a-z]{1,3}$": DIGIT}, "additionalProperties": False, "maxProperties": 2},
    {"type": "object", "properties": {"a": DIGIT}, "additionalProperties": False},
    object_of(a=DIGIT),
    object_of(name=SHORT, age=DIGIT, ok=FLAG),
    object_of(**{f"field_{number}": FLAG for number in range(12)}),
    object_of(**{"with space": DIGIT, 'with "quotes"': DIGIT, "\u00fcml\u00e4ut": DIGIT}),
    object_of(inner=object_of(deeper=object_of(value=SHORT))),
    object_of(list=array_of(object_of(id=DIGIT, tag={"enum": ["x", "y"]}))),
    object_of(kind={"enum": WORDS}, other={"enum": WORDS[::-1]}),
    {"anyOf": [object_of(cat=SHORT), object_of(dog=DIGIT)]},
    {"anyOf": [object_of(type={"const": "circle"}, r=DIGIT), object_of(type={"const": "box"}, w=DIGIT, h=DIGIT)]},
    {"allOf": [object_of(a=DIGIT, b=DIGIT)]},
    object_of(maybe={"anyOf": [{"type": "null"}, object_of(x=DIGIT)]}),
    object_of(at={"type": "string", "format": "date-time"}),
    object_of(colour={"type": "string", "pattern": "^#[0-9a-f]{6}$"}),
]
RECURSIVE: list[Schema] = [
    {**object_of(head={"$ref": "#/$defs/node"}), "$defs": {"node": NODE}},
    {**object_of(tree={"$ref": "#/$defs/t"}), "$defs": {"t": object_of(kids=array_of({"$ref": "#/$defs/t"}, 1))}},
    {**NODE, "$defs": {"node": NODE}},
    {
        **object_of(a={"$ref": "#/$defs/a"}),
        "$defs": {
            "a": object_of(b={"anyOf": [FLAG, {"$ref": "#/$defs/b"}]}),
            "b": object_of(a={"anyOf": [FLAG, {"$ref": "#/$defs/a"}]}),
        },
    },
    {**array_of({"$ref": "#/definitions/d"}), "definitions": {"d": DIGIT}},
    {"$ref": "#/$defs/x", "$defs": {"x": object_of(y={"$ref": "#/$defs/y"}), "y": {"enum": WORDS}}},
    {**object_of(ops=array_of({"$ref": "#/$defs/op"})), "$defs": {"op": {"enum": ["+", "-", "\u00d7", "\\", '"']}}},
    {
        "anyOf": [DIGIT, {"$ref": "#/$defs/sum"}],
        "$defs": {"sum": object_of(left={"anyOf": [DIGIT, {"$ref": "#/$defs/sum"}]}, right=DIGIT)},
    },
]
SCHEMAS = [*VALUES, *CONTAINERS, *RECURSIVE]

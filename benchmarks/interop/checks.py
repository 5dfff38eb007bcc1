"""Checks shared by all clients. Client modules run in another environment and import only this module."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

KINDS = ("models", "plain", "stream", "tools", "schema", "error", "embeddings", "responses")
TEXT = "What is the capital of France? Answer in one word."
WEATHER = "What is the weather in Paris?"
ANSWER = "It is sunny, 21 degrees."
LIMIT = 160  # tokens of an answer
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Server:
    """Address, key and model name of the server."""

    url: str
    key: str
    model: str

    @property
    def api(self) -> str:
        """Base URL of the OpenAI APIs."""
        return f"{self.url}/v1"


def run(checks: dict[str, Callable[[Server], object]]) -> None:
    """Run each check and print JSON: "" for a passed check, else the reason. Command-line arguments name the server.

    A check passes if it returns, and fails if it raises.
    """
    server, found = Server(*sys.argv[1:4]), dict[str, str]()
    for name, check in checks.items():
        assert name in KINDS, name
        try:
            check(server)
            found[name] = ""
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
            found[name] = f"{type(error).__name__}: {error}"[:300] or type(error).__name__
    print(json.dumps(found))


def expect(holds: object, said: object) -> None:
    """Raise AssertionError with `said` unless `holds` is true. Unlike `assert`, this works in optimised Python too."""
    if not holds:
        raise AssertionError(str(said))


def trip(text: str) -> dict[str, Any]:
    """Parse an answer of SCHEMA; raise an error if the answer does not fit it."""
    value = json.loads(text)
    expect(set(value) == {"city", "days"} and isinstance(value["days"], int), value)
    return dict(value)


def refused(kind: type[Exception], call: Callable[[], object], *words: str) -> None:
    """Raise AssertionError unless `call` raises `kind` with a message that contains `words`."""
    try:
        call()
    except kind as error:
        expect(all(word in str(error) for word in words), f"the error says {error}")
        return
    raise AssertionError(f"no {kind.__name__} was raised")

"""The command line `llm`, with a configuration for a server of OpenAI's form."""

import json
import subprocess
import sys
from functools import partial
from typing import Any

from llm.default_plugins.openai_models import Chat

from benchmarks.interop.checks import ANSWER, LIMIT, SCHEMA, TEXT, WEATHER, Server, expect, refused, run, trip


class LlmError(Exception):
    """The stderr of a failed command."""


def llm(server: Server, *words: str, key: str = "", name: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command against the server, greedily."""
    where = ["--key", key or server.key, "-m", name or server.model]
    command = [sys.executable, "-m", "llm", "openai", "endpoint", server.api, *where, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise LlmError(done.stderr.strip())
    return done


GREEDY = ("-o", "temperature", "0", "-o", "max_tokens", str(LIMIT))


def models(server: Server) -> None:
    """List the models."""
    names = llm(server, "--models").stdout.split()
    expect(names == [server.model], names)


def plain(server: Server) -> None:
    """Ask one question and check the answer."""
    expect("Paris" in llm(server, TEXT, "--no-stream", *GREEDY).stdout, "the text")


def stream(server: Server) -> None:
    """Ask the question in a stream and check the text."""
    expect("Paris" in llm(server, TEXT, *GREEDY).stdout, "the text")


class Demanding(Chat):  # type: ignore[misc]
    """Chat model of the `llm` client whose first step demands a tool call; the client has no option for that."""

    def build_kwargs(self, prompt: Any, stream: bool) -> dict[str, Any]:
        """Return the fields of a request."""
        fields: dict[str, Any] = super().build_kwargs(prompt, stream)
        return fields | ({"tool_choice": "none" if prompt.tool_results else "required"} if "tools" in fields else {})


def tools(server: Server) -> None:
    """Have the model call a tool, and continue from its result, with the Python library `llm`."""
    called: list[str] = []

    def weather(city: str) -> str:
        """Return the weather of a city."""
        called.append(city)
        return ANSWER

    model = Demanding(server.model, model_name=server.model, api_base=server.api, supports_tools=True)
    for stream_ in (False, True):
        called.clear()
        options = {"max_tokens": LIMIT, "temperature": 0}
        chain = model.chain(WEATHER, tools=[weather], key=server.key, stream=stream_, options=options)
        expect(chain.text() and called, (stream_, called))


def schema(server: Server) -> None:
    """Ask for JSON of a schema, as one piece and as a stream."""
    for more in (("--no-stream",), ()):
        trip(llm(server, TEXT, "--schema", json.dumps(SCHEMA), *more, *GREEDY).stdout)


def error(server: Server) -> None:
    """Check that a bad field, another model and a wrong key are refused."""
    refused(LlmError, partial(llm, server, TEXT, "-o", "top_p", "0.5", "-o", "max_tokens", "-5"), "max_tokens")
    refused(LlmError, partial(llm, server, TEXT, name="gpt-9"), "gpt-9")
    refused(LlmError, partial(llm, server, TEXT, key="wrong"), "key")


def responses(server: Server) -> None:
    """Ask with the Responses API, as one piece and as a stream."""
    for more in (("--no-stream",), ()):
        expect("Paris" in llm(server, TEXT, "--responses", *more, "-o", "temperature", "0").stdout, more)


if __name__ == "__main__":
    run({
        "models": models, "plain": plain, "stream": stream, "tools": tools, "schema": schema, "error": error,
        "responses": responses,
    })  # fmt: skip

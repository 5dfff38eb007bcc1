"""A model's chat template: a program that came with the weights, run within limits of output, size and time."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import Any

from jinja2.exceptions import TemplateError

from master.text.templates.sandbox import Sandbox
from tpi.errors import ModelError

SECONDS = 5.0  # for a rendering


class TemplateRefusal(ModelError):
    """A chat template that failed or refused a conversation; `reason` is its own sentence."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"the chat template of {model} failed: {reason}; tpi run --raw does without it")
        self.reason = reason


class ChatTemplate:
    """One compiled template. `render` may be called often, by one thread at a time."""

    def __init__(self, source: str, model: str) -> None:
        """`model` is how errors name it; nothing is compiled until the first `render`."""
        self._source = source
        self._model = model
        self._sandbox = Sandbox()
        self._compiled: Any = None

    def render(self, messages: Sequence[Mapping[str, Any]], **names: Any) -> str:
        """The conversation as the template writes it, with the opening of the assistant's turn; it knows `names`.

        Raises:
            ModelError: if the template is wrong, refuses these messages, or goes beyond a limit; whatever it raised.
        """
        try:
            if self._compiled is None:
                self._compiled = self._sandbox.bounded(self._source)
            self._sandbox.written = 0
            with _time_limit(SECONDS):
                rendered: str = self._compiled.render(
                    **{**names, "messages": [dict(message) for message in messages], "add_generation_prompt": True}
                )
        except Exception as error:  # a template can raise anything
            raise TemplateRefusal(self._model, _sentence(error)) from error
        return rendered


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Ends Python code that runs longer, at its next line. Single operations are short, for sizes are bounded."""
    ends = monotonic() + seconds

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        if monotonic() > ends:
            raise TemplateError(f"it takes longer than {seconds:g} s")
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


def _sentence(error: Exception) -> str:
    """What `error` says, on one line of bounded length, without what could steer a terminal."""
    said = " ".join(str(error).split())[:300] or type(error).__name__
    return "".join(character for character in said if character.isprintable())

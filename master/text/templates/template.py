"""A model's chat template: a program that came with the weights, run in a child process within limits."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from master.confined.process import ConfinedError, ConfinedProcess, LimitError, Limits
from tpi.errors import ModelError

SECONDS = 5.0  # seconds of processor time, for compiling and for each rendering
MEMORY = 256 << 20  # bytes of memory, for compiling and for each rendering
FIRST_ANSWER = 0xF0000
"""The character that stands for the answer of message 0, from a private-use plane."""


@dataclass(frozen=True)
class Rendering:
    """The output of a template.

    Attributes:
        text: the complete output.
        marks: one byte for each character of `text`, as in `master.text.templates.provenance`.
    """

    text: str
    marks: bytes


class TemplateRefusal(ModelError):
    """Error of a chat template that failed or refused a conversation; `reason` is the template's own message."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"the chat template of {model} failed: {reason}; tpi run --raw works without a template")
        self.reason = reason


class ChatTemplate:
    """One template, compiled in its child process. `render` may be called often, and from several threads."""

    def __init__(self, source: str, model: str, special: Mapping[str, str] | None = None) -> None:
        """Prepare the child process.

        `model` is the name in errors. The `special` texts, such as `bos_token`, count as written by the template.
        """
        self._model = model
        limits = Limits(SECONDS, MEMORY, SECONDS, MEMORY)
        settings = {"source": source, "special": dict(special or {})}
        self._works = False  # True after the first successful rendering
        # the limit exceeded before any successful rendering; such a template is not tried again
        self._hopeless: str | None = None
        self._process = ConfinedProcess("master.text.templates.renderer", settings, limits)

    def start(self) -> None:
        """Start the child process, so that it loads in the background."""
        self._process.start()

    def render(
        self, messages: Sequence[Mapping[str, Any]], names: Mapping[str, Any], answers: Collection[int] = ()
    ) -> Rendering:
        """Return the conversation as the template writes it, with the opening of the assistant's turn.

        Args:
            names: further values for the template.
            answers: indices of messages whose content is replaced by one character with the mark `ANSWER`.

        Raises:
            TemplateRefusal: if the template is invalid, refuses `messages`, fails in any other way, or exceeds a
                limit.
        """
        asked = {
            "messages": [dict(message) for message in messages],
            "names": dict(names),
            "answers": list(answers),
            "first_answer": FIRST_ANSWER,
        }
        done = self._ask(asked)
        self._works = True
        return Rendering(done["text"], b"".join(bytes([mark]) * length for length, mark in done["runs"]))

    @cached_property
    def names_read(self) -> frozenset[str]:
        """The names that the template reads and does not set itself.

        Raises:
            TemplateRefusal: if the template is invalid or exceeds a limit.
        """
        return frozenset(self._ask({"names_read": True})["names_read"])

    def close(self) -> None:
        """Stop the child process that runs the template."""
        self._process.close()

    def _ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        if self._hopeless is not None:
            raise TemplateRefusal(self._model, self._hopeless)
        try:
            done: dict[str, Any] = self._process.ask(asked)
        except ConfinedError as error:
            if isinstance(error, LimitError) and not self._works:
                self._hopeless = str(error)
            raise TemplateRefusal(self._model, str(error)) from error
        return done

"""Continuing the last message: the prompt then ends with its text, without the end of the turn."""

from collections.abc import Iterable
from typing import Any

from master.text.templates.template import TemplateRefusal
from master.text.templates.traits import Message

_AFTER = " "  # shows whether the template trims contents
_PRIVATE = range(0x100000, 0x10FFFE)


def unused(texts: Iterable[str]) -> str:
    """Return a character of a private-use plane that does not occur in `texts`."""
    used = set("".join(texts))
    return next(character for character in map(chr, _PRIVATE) if character not in used)


def with_end(message: Message, end: str) -> dict[str, Any]:
    """Return the message with `end` and a blank after its text."""
    content = message.get("content") or ""
    if isinstance(content, list):  # a list of parts
        *others, last = content
        return {**message, "content": [*others, {**last, "text": f"{last['text']}{end}{_AFTER}"}]}
    return {**message, "content": f"{content}{end}{_AFTER}"}


def up_to_end(rendered: str, text: str, end: str, model: str) -> int:
    """Return the position of `end` in `rendered`, less the white space that ends `text` if the template trims it.

    Raises:
        TemplateRefusal: if the template does not show the last message.
    """
    before, found, after = rendered.rpartition(end)
    if not found:
        raise TemplateRefusal(model, "it does not show the end of the last message, so it cannot be continued")
    white = text[len(text.rstrip()) :]
    trimmed = white and not after.startswith(_AFTER) and before.endswith(white)
    return len(before) - (len(white) if trimmed else 0)

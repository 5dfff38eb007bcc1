"""Text that comes from elsewhere, made fit to be shown: names, sentences of other nodes, what a model writes."""

import json
import math
import re
from typing import Any

NAME_CHARACTERS = 256  # of a name in a message
SENTENCE_CHARACTERS = 4096

_SEPARATORS = "\u2028\u2029"  # of lines and paragraphs
_OBEYED = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but for tab and line end, DEL, C1: a terminal's commands
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"  # marks, overrides and isolates of writing direction
    r"\ufff9-\ufffb\U000e0000-\U000e007f" + _SEPARATORS + "]"  # annotations, tags
)


def plain(text: str, limit: int = NAME_CHARACTERS) -> str:
    """Return `text` on one line, at most `limit` characters long, that UTF-8 can hold and no terminal obeys.

    Line ends and tabs become blanks; controls, ESC, directional marks and lone surrogates become question marks.
    """
    return "".join(one if one.isprintable() else " " if one.isspace() else "?" for one in text[:limit])


def harmless(text: str) -> str:
    """Return `text` without what a terminal obeys or what hides: controls, directional marks, tags.

    Tabs and line ends stay; Unicode's own separators of lines and paragraphs become blanks.
    """
    return _OBEYED.sub(lambda found: " " if found[0] in _SEPARATORS else "", text)


def json_text(fields: Any) -> str:
    """Return `fields` as JSON on one line in which what `harmless` takes out is spelled as an escape."""
    return _OBEYED.sub(lambda found: json.dumps(found[0])[1:-1], json.dumps(fields, ensure_ascii=False))


def with_address(name: str, address: str) -> str:
    """Return what a machine is called, with its address unless the name has it already."""
    return name if address in name else f"{name} ({address})"


def short_number(value: float, digits: int = 3) -> str:
    """Return `value` with so many significant digits, all digits before the point, and never an exponent."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if places else text

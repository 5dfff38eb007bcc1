"""Text from other sources, made safe to show: names, sentences of other nodes, output of a model."""

import json
import math
import re
from typing import Any

NAME_CHARACTERS = 256  # limit of a name in a message
SENTENCE_CHARACTERS = 4096

_SEPARATORS = "\u2028\u2029"  # Unicode's line and paragraph separators
_OBEYED = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # terminal commands: C0 except tab and line end, DEL, C1
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"  # marks, overrides and isolates of writing direction
    r"\ufff9-\ufffb\U000e0000-\U000e007f" + _SEPARATORS + "]"  # annotations, tags
)


def plain(text: str, limit: int = NAME_CHARACTERS) -> str:
    """Return at most `limit` characters of `text` on one line, safe for a terminal and encodable as UTF-8.

    Line ends and tabs become blanks. Controls, ESC, directional marks and lone surrogates become question marks.
    """
    return "".join(one if one.isprintable() else " " if one.isspace() else "?" for one in text[:limit])


def harmless(text: str) -> str:
    """Return `text` without characters that control a terminal or hide text: controls, directional marks, tags.

    Tabs and line ends stay. Unicode's own line and paragraph separators become blanks.
    """
    return _OBEYED.sub(lambda found: " " if found[0] in _SEPARATORS else "", text)


def json_text(fields: Any) -> str:
    """Return `fields` as JSON on one line, with the characters that `harmless` removes written as escapes."""
    return _OBEYED.sub(lambda found: json.dumps(found[0])[1:-1], json.dumps(fields, ensure_ascii=False))


def with_address(name: str, address: str) -> str:
    """Return a machine's name, followed by its address unless the name contains it."""
    return name if address in name else f"{name} ({address})"


def short_number(value: float, digits: int = 3) -> str:
    """Return `value` with `digits` significant digits, but with all digits before the decimal point.

    The text has no exponent.
    """
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if places else text

"""Text that comes from elsewhere, made fit to be shown: names, sentences of other nodes, what a model writes."""

import unicodedata

NAME_CHARACTERS = 256  # of a name in a message
SENTENCE_CHARACTERS = 4096


def plain(text: str, limit: int = NAME_CHARACTERS) -> str:
    """`text` on one line, at most `limit` characters long, that UTF-8 can hold and no terminal obeys.

    Line ends and tabs become blanks; controls, ESC, directional marks and lone surrogates become question marks.
    """
    return "".join(one if one.isprintable() else " " if one.isspace() else "?" for one in text[:limit])


def harmless(text: str) -> str:
    """`text` without control characters, but for tabs and line ends: they could do anything to a terminal."""
    return "".join(one for one in text if one in "\n\t" or unicodedata.category(one) != "Cc")

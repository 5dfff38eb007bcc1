"""Words wrap at a terminal's edge, however the text comes in pieces and however wide its characters are."""

import random
import re

import pytest

from master.reporting.prose import CodeLines
from tpi.wrap import WordWrap, text_width, wrapped

TEXT = (
    "A sentence of several words, some-of-them joined; then a list:\n\n"
    "- the first item has so many words that it needs further lines\n"
    "12. the twelfth item does, too, and has a verylongwordthatfitsnoline within\n"
    "\tafter a tab\n    indented words that go on and on and on\n"
    "Cafe\u0301s and nai\u0308ve re\u0301sume\u0301s count their marks for nothing at all.\n"
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u306f\u3001\u7a7a\u767d\u306a\u3057\u3067\u6298\u308a\u8fd4\u3059\u3002 End."
)


def in_pieces(text: str, width: int, seed: int) -> str:
    """Return `text` as it is shown if it arrives in pieces of 1 to 6 characters."""
    chance, wrap, shown, at = random.Random(seed), WordWrap[None](lambda: width), "", 0
    while at < len(text):
        size = chance.randint(1, 6)
        shown += "".join(part for part, _ in wrap.push(text[at : at + size], None))
        at += size
    return shown + "".join(part for part, _ in wrap.flush())


def words(text: str) -> str:
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("width", [12, 20, 33, 60, 400])
def test_lines_end_between_words(width: int) -> None:
    shown = wrapped(TEXT, width)
    assert words(shown) == words(TEXT)
    for line in shown.split("\n"):
        column = 0
        for number, part in enumerate(re.findall(r"\s+|\S+", line.replace("\t", " " * 8))):
            column += text_width(part)
            if column > width:
                assert number < 2, line  # the terminal breaks what does not fit into a line alone
                column = (column - 1) % width + 1
    whole = set(re.findall(r"[\w\u0300-\u036f,;:.-]+", TEXT))
    assert {word for word in re.findall(r"[\w\u0300-\u036f,;:.-]+", shown) if word.isascii()} <= whole
    assert not re.search("\n *[\u3001\u3002\u0301\u0308]", shown)  # no mark and no full stop begins a line


@pytest.mark.parametrize("width", [12, 20, 60])
def test_pieces_are_shown_as_the_whole(width: int) -> None:
    assert {in_pieces(TEXT, width, seed) for seed in range(20)} == {wrapped(TEXT, width)}


def test_further_lines_of_an_item_begin_under_its_text() -> None:
    assert wrapped("- one two three", 9) == "- one two\n  three".replace("one two", "one two")
    assert wrapped("10. one two", 9) == "10. one\n    two"


def test_an_unknown_width_wraps_nothing_and_holds_nothing_back() -> None:
    assert [part for part, _ in WordWrap[None](lambda: 0).push(TEXT, None)] == [TEXT]


def test_a_resize_counts_at_once_and_words_keep_their_styles() -> None:
    width = 20
    wrap = WordWrap[str](lambda: width)
    shown = [*wrap.push("one two ", "a")]
    width = 10
    shown += [*wrap.push("thr", "a"), *wrap.push("ee ", "b"), *wrap.flush()]
    assert "".join(text for text, _ in shown) == "one two\nthree "
    assert ("thr", "a") in shown
    assert ("ee", "b") in shown


def test_code_is_found() -> None:
    lines = (
        "a\n```py\n  x\n\n    y\n```\nb\n\n    code\n    more\nc\n    lazy\n- item\n\n    of the item\n\nd\n\n\tcode\n"
    )
    found, code = [], CodeLines()
    for line in lines.splitlines():
        code.begins(line)
        if code.inside and line.strip():
            found.append(line.strip())
    assert found == ["```py", "x", "y", "```", "code", "more", "code"]

"""Markdown at a terminal: pieces look like the whole, and every word is shown."""

import io
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from master.chat.showing.markdown import MarkdownScreen

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def shown(pieces: list[str]) -> str:
    """Return the terminal's text for an answer of these pieces."""
    written: list[str] = []
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=60, legacy_windows=False)
    screen = MarkdownScreen(written.append, console)
    for piece in pieces:
        screen.write(piece)
    screen.end()
    return "".join(written)


def plain(text: str) -> str:
    return _ESCAPE.sub("", text)


def words(styled: str) -> str:
    """Merge neighbouring parts of one style: cuts between them make no difference, and line ends have no style."""
    current, merged = "", list[tuple[str, str]]()
    for part in re.split(r"(\x1b\[[0-9;]*m|\n)", styled):
        style = "" if part == "\n" else current
        if part.startswith("\x1b"):
            current = "" if part == "\x1b[0m" else part
        elif part and merged and merged[-1][0] == style:
            merged[-1] = (style, merged[-1][1] + part)
        elif part:
            merged.append((style, part))
    return repr(merged)


BOLD, ITALIC, CODE, OFF, DIM, LINE = "\x1b[1m", "\x1b[3m", "\x1b[36m", "\x1b[0m", "\x1b[2m", "\x1b[4m"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello **you** there", f"Hello {BOLD}you{OFF} there\n"),
        ("a *b* `c*d*`", f"a {ITALIC}b{OFF} {CODE}c*d*{OFF}\n"),
        ("# Title\ntext", f"{BOLD}Title{OFF}\ntext\n"),
        ("- one\n  * two", f"{DIM}\u2022 {OFF}one\n{DIM}  \u2022 {OFF}two\n"),
        ("1. one", "1. one\n"),
        ("> said", f"{DIM}\u2502 {OFF}{ITALIC}said{OFF}\n"),
        ("2 * 3 * 4 and a_b_c \\*d\\*", "2 * 3 * 4 and a_b_c *d*\n"),
        ("[x](https://a.example) [1]", f"{LINE}x{OFF}{DIM} (https://a.example){OFF} [1]\n"),
        ("```py\nx = `**1**`\n```\nend", f"{DIM}py{OFF}\n{CODE}x = `**1**`{OFF}\nend\n"),
        ("a **b", "a **b\n"),
        ("def f(**kwargs): pass", "def f(**kwargs): pass\n"),
        ("---", f"{DIM}{chr(0x2500) * 40}{OFF}\n"),
        ("| a |", "| a |\n"),
        ("", ""),
    ],
)
def test_what_markdown_looks_like(text: str, expected: str) -> None:
    assert words(shown([text])) == words(expected)


def test_a_table() -> None:
    lines = plain(shown(["| name | age |\n|---|---|\n| Ann | 5 |\n\nend"])).splitlines()
    assert next(line.split() for line in lines if "n" in line) == ["name", "age"]
    assert any(line.split() == ["Ann", "5"] for line in lines)
    assert lines[-1] == "end"


MARKS = st.sampled_from(
    [
        "**", "*", "_", "__", "`", "```", "~~~", "~~", "|", "|-|", "[a](b)", "[", "](", "\\", "word", "\n", " ",
        "# ", "- ", "> ", "1. ",
    ]
)  # fmt: skip
TEXTS = st.lists(MARKS | st.text(max_size=3), max_size=30).map("".join)


@given(TEXTS, st.data())
@example("**a*b*c** `", None)
@example("#  ", None)
@example("# a\tb", None)
def test_pieces_look_as_the_whole(text: str, data: st.DataObject | None) -> None:
    if data is None:
        cuts = list(range(1, len(text)))
    else:
        cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert words(shown(pieces)) == words(shown([text]))
    assert words(shown(list(text))) == words(shown([text]))


@given(st.text(max_size=60))
def test_a_terminal_is_not_controlled_by_what_a_model_writes(text: str) -> None:
    assert not set(plain(shown([text]))) & {chr(code) for code in (*range(9), *range(11, 32), 127, *range(128, 160))}


@given(
    st.lists(st.from_regex(r"[a-z]{1,8}", fullmatch=True), min_size=1, max_size=30),
    st.sampled_from(["**", "*", "`", "_"]),
)
def test_no_word_is_lost(said: list[str], mark: str) -> None:
    text = " ".join(f"{mark}{word}{mark}" if number % 3 else word for number, word in enumerate(said))
    assert plain(shown([text])).split() == said


def test_words_come_before_the_line_is_complete() -> None:
    written: list[str] = []
    screen = MarkdownScreen(written.append, Console(file=io.StringIO(), force_terminal=True, width=60))
    screen.write("The answer ")
    assert written == ["The answer "]
    screen.write("is **fo")
    assert "".join(written) == "The answer is "
    screen.write("ur**.")
    assert plain("".join(written)) == "The answer is four."
    screen.write("\n```\ncode")
    assert plain("".join(written)).endswith("code")

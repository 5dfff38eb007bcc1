"""Markdown within a line: bold, italic, code, links. Spans are found before a line is complete."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_MOST = 200  # characters of a span, which bounds the text that an unclosed star holds back


@dataclass(frozen=True)
class Span:
    """A piece of text with the name of its style, empty for none."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class _Kind:
    """A kind of span, such as bold.

    `whole` matches a complete span, with the group `text`; `part` an incomplete one.
    """

    style: str
    whole: re.Pattern[str]
    part: re.Pattern[str]
    within_words: bool = True


def _kind(style: str, opening: str, closing: str, after: str, within_words: bool = True) -> _Kind:
    """Return a kind of span between two marks, whose closing mark must not be followed by the pattern `after`."""
    whole = rf"{opening}(?!\s)(?P<text>.{{1,{_MOST}}}?)(?<!\s){closing}(?!{after})"
    return _Kind(style, re.compile(whole), re.compile(rf"{opening}(?!\s).{{0,{_MOST + 4}}}"), within_words)


_CODE = _Kind(
    "code",
    re.compile(rf"(?P<open>`{{1,4}})(?!`)(?P<text>.{{1,{_MOST}}}?)(?<!`)(?P=open)(?!`)"),
    re.compile(rf"`{{1,4}}(?!`).{{0,{_MOST + 4}}}|`{{1,4}}"),
)
_LINK = _Kind(
    "link",
    re.compile(r"\[(?P<text>[^\[\]]{1,80})\]\((?P<url>[^()\s]{1,300})\)"),
    re.compile(r"\[[^\[\]]{0,80}(\](\([^()\s]{0,300})?)?"),
)
_ESCAPE = _Kind("", re.compile(r"\\(?P<text>[!-/:-@\[-`{-~])"), re.compile(r"\\"))
_KINDS: dict[str, tuple[_Kind, ...]] = {
    "`": (_CODE,),
    "[": (_LINK,),
    "\\": (_ESCAPE,),
    "*": (_kind("bold", r"\*\*(?!\*)", r"\*\*", r"\*"), _kind("italic", r"\*(?!\*)", r"(?<!\*)\*", r"\*")),
    "_": (
        _kind("bold", "__(?!_)", "__", r"\w", within_words=False),
        _kind("italic", "_(?!_)", "(?<!_)_", r"\w", within_words=False),
    ),
    "~": (_kind("strike", "~~(?!~)", "~~", "~"),),
}
_SPECIAL = re.compile(r"[`\[\\*_~]")
_NESTING = ("bold", "italic", "strike", "link")


class LineSpans:
    """A parser of one line.

    It holds back text that may still become a span, until the span is complete or impossible, or the line ends.
    """

    def __init__(self) -> None:
        self._rest, self._last = "", " "

    def push(self, text: str, over: bool) -> Iterator[Span]:
        """Yield the spans that are complete after `text`. `over` is True if the line ends after `text`."""
        self._rest += text
        while self._rest:
            found = _SPECIAL.search(self._rest)
            if found is None or found.start():
                yield self._take(found.start() if found else len(self._rest))
                continue
            for kind in _KINDS[found[0]]:
                whole = kind.whole.match(self._rest) if self._may_open(kind) else None
                if whole and (over or whole.end() < len(self._rest) or kind is _LINK or kind is _ESCAPE):
                    self._take(whole.end())
                    yield from _shown(kind.style, whole)
                    break
            else:
                if not over and self._may_become():
                    return
                yield self._take(1)

    def _take(self, count: int) -> Span:
        taken, self._rest = self._rest[:count], self._rest[count:]
        self._last = taken[-1]
        return Span(taken)

    def _may_open(self, kind: _Kind) -> bool:
        return kind.within_words or not self._last.isalnum()

    def _may_become(self) -> bool:
        kinds = _KINDS[self._rest[0]]
        marks = self._rest in (self._rest[0] * len(self._rest), "\\") and len(self._rest) <= 4
        return any(self._may_open(kind) and (marks or kind.part.fullmatch(self._rest)) for kind in kinds)


def _shown(style: str, whole: re.Match[str]) -> Iterator[Span]:
    """Yield a span's text; bold, italic, struck and linked text may have further spans in it."""
    if style not in _NESTING:
        yield Span(whole["text"], style)
        return
    for inner in LineSpans().push(whole["text"], over=True):
        yield Span(inner.text, f"{style} {inner.style}".strip())
    if style == "link" and whole["url"] != whole["text"]:
        yield Span(f" ({whole['url']})", "quiet")

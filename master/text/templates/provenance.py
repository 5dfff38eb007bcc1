"""Strings with a mark on each character that tells if the chat template wrote it.

A control token is recognised only if the template wrote all of its characters. Therefore each character carries a mark,
and each operation passes the marks on. An operation that this module does not know returns a plain `str`, which counts
as the caller's. A forgotten operation may therefore lose a control token of the template, but never creates one from a
caller's text.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

CALLER, TEMPLATE, ANSWER = b"\x00", b"\x01", b"\x02"
"""Marks: sent by a caller, written by the template, standing for an earlier answer of the model."""

_CONVERSION = re.compile(
    r"%(?:\((?P<key>[^()]*)\))?(?P<flags>[#0\- +]*)(?P<width>\*|\d+)?"
    r"(?:\.(?P<precision>\*|\d+))?[hlL]?(?P<kind>.)",
    re.DOTALL,
)


class Text(str):
    """A string with one mark for each character. It compares, hashes and searches as the plain string does."""

    __slots__ = ("_marks",)
    _marks: bytes

    def __new__(cls, value: str = "", marks: bytes | None = None) -> "Text":
        """Create a text of `value` with one mark for each character; without `marks`, all of it is the caller's."""
        self = super().__new__(cls, value)
        self._marks = marks if marks is not None and len(marks) == len(self) else CALLER * len(self)
        return self

    def __str__(self) -> str:
        return self

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: SupportsIndex | slice) -> "Text":
        value = super().__getitem__(index)
        if isinstance(index, slice):
            return Text(value, self._marks[index])
        at = range(len(self))[index]
        return Text(value, self._marks[at : at + 1])

    def __add__(self, other: str) -> "Text":
        return Text(super().__add__(other), self._marks + marks_of(other))

    def __radd__(self, other: str) -> "Text":
        return Text(other) + self  # a plain string is the caller's

    def __mul__(self, count: SupportsIndex) -> "Text":
        return Text(super().__mul__(count), self._marks * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> "Text":
        return agreed(super().__mod__(values), lambda: _converted(self, values))

    def join(self, parts: Iterable[str]) -> "Text":
        """Join `parts` as `str.join` does, with their marks."""
        listed = list(parts)
        return Text(super().join(listed), self._marks.join(map(marks_of, listed)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """Split as `str.split` does; the pieces keep their marks."""
        pieces, found, at = super().split(sep, maxsplit), list[str](), 0
        for piece in pieces:
            at = at if sep is not None else self.find(piece, at)
            found.append(self[at : at + len(piece)])
            at += len(piece) + len(sep or "")
        return found

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """Split as `str.rsplit` does; the pieces keep their marks."""
        pieces, found, end = super().rsplit(sep, maxsplit), list[str](), len(self)
        for piece in reversed(pieces):
            end = end if sep is not None else self.rfind(piece, 0, end) + len(piece)
            found.append(self[end - len(piece) : end])
            end -= len(piece) + len(sep or "")
        return found[::-1]

    def splitlines(self, keepends: bool = False) -> list[str]:
        """Split as `str.splitlines` does; the lines keep their marks."""
        found, at = list[str](), 0
        for whole, line in zip(super().splitlines(True), super().splitlines(keepends), strict=True):
            found.append(self[at : at + len(line)])
            at += len(whole)
        return found

    def partition(self, sep: str) -> tuple[str, str, str]:
        """Split as `str.partition` does; the parts keep their marks."""
        return self._three(super().partition(sep))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        """Split as `str.rpartition` does; the parts keep their marks."""
        return self._three(super().rpartition(sep))

    def strip(self, chars: str | None = None) -> "Text":
        """Strip as `str.strip` does; the rest keeps its marks."""
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> "Text":
        """Strip as `str.lstrip` does; the rest keeps its marks."""
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> "Text":
        """Strip as `str.rstrip` does; the rest keeps its marks."""
        return self[: len(super().rstrip(chars))]

    def removeprefix(self, prefix: str) -> "Text":
        """Remove a prefix as `str.removeprefix` does; the rest keeps its marks."""
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> "Text":
        """Remove a suffix as `str.removesuffix` does; the rest keeps its marks."""
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> "Text":
        """Replace as `str.replace` does; the new text has the marks of `new`."""
        if old:
            return as_text(new).join(self.split(old, count))
        most = len(self) + 1
        limit = most if int(count) < 0 else min(int(count), most)
        if limit == 0:
            return self
        return as_text(new).join([self[:0], *(self[at] for at in range(limit - 1)), self[limit - 1 :]])

    def center(self, width: SupportsIndex, fillchar: str = " ") -> "Text":
        """Pad as `str.center` does; the padding has the marks of `fillchar`."""
        room = max(0, int(width) - len(self))
        left = room // 2 + (room & int(width) & 1)
        return agreed(super().center(width, fillchar), lambda: _filled(fillchar, left, self, room - left))

    def ljust(self, width: SupportsIndex, fillchar: str = " ") -> "Text":
        """Pad as `str.ljust` does; the padding has the marks of `fillchar`."""
        room = max(0, int(width) - len(self))
        return agreed(super().ljust(width, fillchar), lambda: _filled(fillchar, 0, self, room))

    def rjust(self, width: SupportsIndex, fillchar: str = " ") -> "Text":
        """Pad as `str.rjust` does; the padding has the marks of `fillchar`."""
        room = max(0, int(width) - len(self))
        return agreed(super().rjust(width, fillchar), lambda: _filled(fillchar, room, self, 0))

    def zfill(self, width: SupportsIndex) -> "Text":
        """Pad as `str.zfill` does; the zeros are the caller's."""
        value, sign = super().zfill(width), int(self.startswith(("+", "-")))
        return agreed(value, lambda: joined((self[:sign], "0" * (len(value) - len(self)), self[sign:])))

    def expandtabs(self, tabsize: SupportsIndex = 8) -> "Text":
        """Expand tabs as `str.expandtabs` does; the blanks are the caller's."""
        value, parts, column = super().expandtabs(tabsize), list[str](), 0
        for line in self.split("\n"):
            first, *others = line.split("\t")
            parts, column = [*parts, first], len(first)
            for part in others:
                blanks = int(tabsize) - column % int(tabsize) if int(tabsize) > 0 else 0
                parts += [" " * blanks, part]
                column += blanks + len(part)
            parts.append("\n")
        return agreed(value, lambda: joined(parts[:-1]))

    def translate(self, table: Any) -> "Text":
        """Translate as `str.translate` does; changed characters are the caller's."""
        value = super().translate(table)
        changed = (str.translate(character, table) for character in self)
        kept = (old if new == old else new for old, new in zip(self, changed, strict=True))
        return agreed(value, lambda: joined(kept))

    def lower(self) -> "Text":
        """Return the text in lower case, with its marks."""
        return self.recased(super().lower())

    def upper(self) -> "Text":
        """Return the text in upper case, with its marks."""
        return self.recased(super().upper())

    def casefold(self) -> "Text":
        """Return the case-folded text, with its marks."""
        return self.recased(super().casefold())

    def swapcase(self) -> "Text":
        """Return the text with its cases swapped, with its marks."""
        return self.recased(super().swapcase())

    def title(self) -> "Text":
        """Return the text in title case, with its marks."""
        return self.recased(super().title())

    def capitalize(self) -> "Text":
        """Return the capitalized text, with its marks."""
        return self.recased(super().capitalize())

    def recased(self, value: str) -> "Text":
        """Return `value`, this text in another case, with marks. One character may become up to three."""
        if len(value) == len(self):
            return Text(value, self._marks)
        marks, at = list[bytes](), 0
        for character, mark in zip(str.__iter__(self), self._marks, strict=True):
            cases = (character.upper(), character.lower(), character.title(), character.casefold(), character)
            length = next((len(case) for case in sorted(cases, key=len)[::-1] if value.startswith(case, at)), 1)
            marks.append(bytes([mark]) * length)
            at += length
        return Text(value, b"".join(marks))

    def _three(self, parts: tuple[str, str, str]) -> tuple[str, str, str]:
        first, second = len(parts[0]), len(parts[0]) + len(parts[1])
        return self[:first], self[first:second], self[second:]


def own(value: str) -> Text:
    """Return `value` marked as written by the template."""
    return Text(value, TEMPLATE * len(value))


def marks_of(value: str) -> bytes:
    """Return the marks of `value`, one for each character; a plain string is the caller's."""
    return value._marks if isinstance(value, Text) else CALLER * len(value)


class CallerInt(int):
    """A whole number that a caller sent. Its text counts as the caller's."""


class CallerFloat(float):
    """A number that a caller sent: as text it is the caller's."""


def as_text(value: Any) -> Text:
    """Return `value` as text with marks. A number that the template computed counts as the template's."""
    if isinstance(value, Text):
        return value
    return own(str(value)) if type(value) in (int, float) else Text(str(value))


def joined(parts: Iterable[Any]) -> Text:
    """Return all of `parts` joined, as text."""
    return Text().join(map(as_text, parts))


def from_caller(value: Any) -> Any:
    """Return JSON that a caller sent, with everything in it marked as the caller's."""
    if isinstance(value, str):
        return Text(value)
    if isinstance(value, dict):
        return {Text(key): from_caller(part) for key, part in value.items()}
    if isinstance(value, list):
        return [from_caller(part) for part in value]
    if isinstance(value, float):
        return CallerFloat(value)
    return CallerInt(value) if type(value) is int else value


def agreed(plain: str, made: Callable[[], Text]) -> Text:
    """Return `made()` if it equals `plain`, and else `plain` as the caller's text."""
    try:
        found = made()
    except (LookupError, TypeError, ValueError, StopIteration):  # a format that only Python's own operation can read
        return Text(plain)
    return found if found == plain else Text(plain)


def _filled(fill: str, left: int, text: Text, right: int) -> Text:
    return joined((as_text(fill) * left, text, as_text(fill) * right))


def _converted(form: Text, values: Any) -> Text:
    """Return `form % values`; each character of the result keeps the mark that tells its origin."""
    parts, at = list[Text](), 0
    given = iter(values if isinstance(values, tuple) else (values,))
    for found in _CONVERSION.finditer(form):
        parts.append(form[at : found.start()])
        at = found.end()
        if found["kind"] == "%":
            parts.append(form[at - 1 : at])
            continue
        sizes = [str(next(given)) if size == "*" else size for size in (found["width"], found["precision"])]
        value = values[found["key"]] if isinstance(values, Mapping) and found["key"] is not None else next(given)
        parts.append(_one(found["flags"], sizes[0], sizes[1], found["kind"], value))
    return joined([*parts, form[at:]])


def _one(flags: str, width: str | None, precision: str | None, kind: str, value: Any) -> Text:
    """Return one value formatted by a `%` conversion, with marks."""
    if kind != "s":
        said = f"%{flags}{width or ''}{'' if precision is None else '.' + precision}{kind}" % (value,)
        return own(said) if kind != "c" and type(value) in (int, float) else Text(said)
    text = as_text(value)[: None if precision is None else int(precision)]
    size = int(width or 0)
    return text.ljust(size) if "-" in flags or size < 0 else text.rjust(size)

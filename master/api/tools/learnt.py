"""Calls between the marks that a model's chat template was found to write (`master.text.templates.calls`)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from master.api.answers.events import Piece, TextPiece, ToolCall
from master.api.forms import problem_of
from master.api.tools.parser import calls_in
from master.api.tools.scan import held_back, json_end
from master.api.tools.typed import Literals, More, Never, typed
from master.text.templates.calls import ANY, KEY, CallMarks, atoms

_NOT_ANY = "<>[]{}|\"'"  # characters that an id or a number does not contain
_KEY_CHARS = 256  # limit of a key
_CDATA = ("<![CDATA[", "]]>")


class LearntParser:
    """A parser of text with calls. A call is returned when it is complete; other text is returned unchanged."""

    def __init__(self, marks: CallMarks, tools: Sequence[Mapping[str, Any]]) -> None:
        """Create a parser of calls to `tools`, each with a name and perhaps the schema of its parameters."""
        self._marks = marks
        self._reader = CallReader(marks, tools)
        self._starts = tuple(dict.fromkeys(atoms(one)[0] for one in marks.beginnings))
        self._text = ""
        self._inside = self._called = False  # `_inside`: another call may follow directly; `_called`: there was a call

    def push(self, text: str) -> list[Piece]:
        """Parse more text; return the plain text and the complete calls that later text cannot change."""
        self._text += text
        return self._pieces(last=False)

    def flush(self) -> list[Piece]:
        """Return the text that was held back, at the end of the answer."""
        return self._pieces(last=True)

    def _pieces(self, last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._text:
            found = self._following(last) if self._inside else self._first(last)
            if found is None:
                break
            pieces += found
        return pieces

    def _following(self, last: bool) -> list[Piece] | None:
        """Return the call that follows a call, or an empty list if none follows; None if more text is needed.

        `last` is True if the answer is complete.
        """
        reader, marks = self._reader, self._marks
        try:
            for end in filter(str.strip, (marks.section_end, marks.closing)):
                try:
                    self._text = self._text[reader.mark(end, self._text, 0, last) :]
                except Never:
                    continue
                self._inside = end == marks.closing
                return []
            at = reader.mark(marks.separator, self._text, 0, last, optional=True)
            calls, at = reader.calls(self._text, at, last, again=True)
        except (More, Never) as error:
            if isinstance(error, More) and not last:
                return None
            self._inside = False
            return []
        self._text = self._text[at:]
        return calls

    def _first(self, last: bool) -> list[Piece] | None:
        """Return the text before the next call or, if the text begins with a call, the call.

        Return None if more text is needed.

        `last` is True if the answer is complete.
        """
        places = [place for one in self._starts if (place := self._text.find(one)) >= 0]
        if not places:
            keep = 0 if last else held_back(self._text, self._starts)
            before = self._text[: len(self._text) - keep]
            said = before if last else before.rstrip()
            self._text = self._text[len(said) :]
            return self._plain(said) or None
        place = min(places)
        try:
            calls, at = self._reader.calls(self._text, place, last)
        except (More, Never) as error:
            if isinstance(error, More) and not last:
                before = self._text[:place].rstrip()
                self._text = self._text[len(before) :]
                return self._plain(before) or None
            said, self._text = self._text[: place + 1], self._text[place + 1 :]
            return self._plain(said)
        before, self._text = self._text[:place].rstrip(), self._text[at:]
        pieces = self._plain(before)
        self._inside = self._called = True
        return pieces + calls

    def _plain(self, text: str) -> list[Piece]:
        return [TextPiece(text)] if text and not (self._called and not text.strip()) else []


class CallReader:
    """Reader of calls in a text.

    Methods raise More if the text ends too early, and Never if it cannot be a call. Their argument `last` is True if
    `text` is complete, so that nothing can follow.
    """

    def __init__(self, marks: CallMarks, tools: Sequence[Mapping[str, Any]]) -> None:
        self._marks = marks
        self._schemas = {tool["name"]: tool.get("parameters") or {} for tool in tools}
        self._names = sorted(self._schemas, key=len, reverse=True)
        self._literals = Literals(marks.quote)

    def calls(self, text: str, at: int, last: bool, again: bool = False) -> tuple[list[Piece], int]:
        """Return the call at the index `at`, or all calls of an array, and the index of their end.

        `again` is True if the call follows another call.
        """
        marks, read = self._marks, None
        beginnings = [marks.opening] if again else [marks.section + marks.opening, marks.opening, *marks.beginnings]
        unsure = False
        for beginning in dict.fromkeys(beginnings):
            if not again and not beginning.strip():
                continue
            try:
                read = self.mark(beginning, text, at, last)
                if marks.kind == "object":
                    return self._object(text, read, last)
                return self._named(text, read, last)
            except More:
                unsure = True
            except Never:
                continue
        if unsure:
            raise More
        raise Never

    def mark(self, mark: str, text: str, at: int, last: bool, optional: bool = False) -> int:
        """Return the index of the end of `mark`, which begins at the index `at`.

        White space within the mark may be missing in `text`. If an `optional` mark is missing, return `at`. If `text`
        ends within the mark and may go on (`last` is False), raise More.
        """
        start = at
        for atom in atoms(mark):
            skipped = _skipped(text, at)
            if atom.isspace():
                at = skipped
            elif atom == ANY:
                while at < len(text) and text[at] not in _NOT_ANY and not text[at].isspace():
                    at += 1
            elif text.startswith(atom, skipped if atom[0] in "<[" or at == start else at):
                at = (skipped if atom[0] in "<[" or at == start else at) + len(atom)
            elif atom.startswith(text[skipped:]) and not last:
                raise More
            elif optional:
                return start
            else:
                raise Never
        return at

    def _object(self, text: str, at: int, last: bool) -> tuple[list[Piece], int]:
        """Return the calls in the JSON value at the index `at`, and the index of their end."""
        at = _skipped(text, at)
        end = self._json_end(text, at, last)
        calls = calls_in(text[at:end], list(self._schemas))
        if calls is None:
            raise Never
        return calls, self._closed(text, end, last)

    def _named(self, text: str, at: int, last: bool) -> tuple[list[Piece], int]:
        """Return the call whose tool name begins at the index `at`, and the index of its end."""
        unsure = False
        at = _skipped(text, at)
        for name in self._names:
            if not text.startswith(name, at):
                unsure = unsure or name.startswith(text[at:])
                continue
            try:
                after = self._name_end(text, at + len(name), last)
                arguments, end = self._arguments(name, text, after, last)
                said = json.dumps(arguments, ensure_ascii=False)
                if problem_of(arguments) is not None:
                    raise Never
                return [ToolCall(name, said)], end
            except More:
                unsure = True
            except Never:
                continue
        if unsure and not last:
            raise More
        raise Never

    def _name_end(self, text: str, at: int, last: bool) -> int:
        """Return the index of the end of the mark after the name.

        If JSON follows, a model may leave out the mark, or all tags of the mark except the last.
        """
        mark = self._marks.name_end.rstrip()
        try:
            return self.mark(mark, text, at, last)
        except Never:
            if self._marks.kind != "json":
                raise
        try:
            return self.mark(atoms(mark)[-1], text, at, last)
        except (Never, IndexError):
            return at

    def _arguments(self, name: str, text: str, at: int, last: bool) -> tuple[dict[str, Any], int]:
        """Return the arguments that begin at the index `at`, and the index of the call's end."""
        marks, found = self._marks, dict[str, Any]()
        if marks.kind == "json":
            at = _skipped(text, at)
            end = self._json_end(text, at, last)
            try:
                value = json.loads(text[at:end], strict=False)
            except (ValueError, RecursionError):
                raise Never from None
            if not isinstance(value, dict):
                raise Never
            return value, self._closed(text, end, last)
        while True:
            try:
                return found, self._closed(text, at, last, required=not (last and found))
            except Never:
                pass
            if found:
                at = self.mark(marks.between, text, at, last, optional=True)
            at = self.mark(marks.key_open, text, at, last)
            key, at, stringly = self._key(text, at, last)
            if marks.kind == "values":
                found[key], at = self._literals.value(text, at)
                at = self.mark(marks.value_end, text, at, last)
            else:
                raw, at = self._raw(key, text, at, last)
                properties = self._schemas[name].get("properties")
                schema = properties.get(key) if isinstance(properties, dict) else None
                untold = not isinstance(schema, dict) or not schema
                found[key] = raw if stringly and untold else typed(raw, schema, self._schemas[name])

    def _key(self, text: str, at: int, last: bool) -> tuple[str, int, bool]:
        """Return the argument's name at the index `at`, the index of its value, and True if its marks declare a
        string.
        """
        marks = self._marks
        first = marks.key_end.rstrip().split(ANY)[0]
        end = text.find(first, at, at + _KEY_CHARS)
        if end < 0:
            if len(text) - at >= _KEY_CHARS or last:
                raise Never
            raise More
        after = self.mark(marks.key_end.rstrip(), text, end, last)
        stringly = marks.string_end != marks.key_end and text.startswith(marks.string_end.rstrip(), end)
        return text[at:end].strip().strip("\"'"), after, stringly

    def _raw(self, key: str, text: str, at: int, last: bool) -> tuple[str, int]:
        """Return the raw text of a value, and the index after its closing mark.

        A closing mark counts only if a further argument or the call's end follows it.
        """
        marks = self._marks
        lead = marks.key_end[len(marks.key_end.rstrip()) :]
        trail = marks.value_end[: len(marks.value_end) - len(marks.value_end.lstrip())]
        mark = marks.value_end.strip().replace(KEY, key)
        end = at - 1
        while (end := text.find(mark, end + 1)) >= 0:
            after, unsure = end + len(mark), False
            for following in filter(str.strip, (marks.closing, marks.between + marks.key_open)):
                try:
                    self.mark(atoms(following.strip())[0], text, after, last)
                    break
                except More:
                    unsure = True
                except Never:
                    continue
            else:
                if unsure:
                    raise More
                if not (last and not text[after:].strip()):
                    continue
            raw = text[at:end]
            raw = raw.removeprefix(lead) if lead else raw
            raw = raw.removesuffix(trail) if trail else raw
            quoted = raw.startswith(_CDATA[0]) and raw.endswith(_CDATA[1])  # as XML quotes text
            return (raw[len(_CDATA[0]) : -len(_CDATA[1])] if quoted else raw), after
        raise Never if last else More

    def _closed(self, text: str, at: int, last: bool, required: bool = True) -> int:
        """Return the index after the mark that closes a call's arguments, which begins at the index `at`.

        If `required` is True, the first tag of the mark must be there. The rest of the mark may be missing.
        """
        closing = atoms(self._marks.closing.strip())
        if not closing:
            return at
        if self._marks.kind in ("json", "object"):
            return self.mark(self._marks.closing.strip(), text, at, last, optional=True)
        end = self.mark(closing[0], text, at, last, optional=not required)
        for atom in closing[1:]:
            end = self.mark(atom, text, end, last, optional=True)
        return end

    def _json_end(self, text: str, at: int, last: bool) -> int:
        if at >= len(text) and not last:
            raise More
        try:
            end = json_end(text, at)
        except ValueError:
            raise Never from None
        if end is None:
            raise Never if last else More
        return end


def _skipped(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at

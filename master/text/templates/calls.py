"""The marks that a chat template writes around tool calls, learnt by rendering calls with known words."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

ANY, KEY = "\x00", "\x01"
"""Characters in marks: ANY stands for an id or a number, KEY for the key of the argument."""

Kind = Literal["object", "json", "tags", "values"]
Calls = Sequence[tuple[str, Mapping[str, Any]]]
Show = Callable[[str | None, Calls], str]
"""Renders a message of the assistant with this content and these calls, as a part of a conversation."""

IDS = ("tpi0id0a1", "tpi1id1b2")  # nine letters and digits, as Mistral's templates demand
_ANSWER = "tpianswer"
_FIRST: tuple[str, dict[str, Any]] = ("tpitool", {"tpikeya": "tpivalue", "tpikeyb": 41973, "tpikeyc": "tpifinal"})
_SECOND: tuple[str, dict[str, Any]] = ("tpiother", {"tpikeya": "tpilast"})
_ATOM = re.compile(r"<(?=[\w|/\uff5c\]!?])[^<>\x00]*>?|\[[^\[\]<>\x00]*\]?|\s+|.", re.DOTALL)
_TAG = ("<", "[")
_STRANGE = ("tpitool", "tpikey", "tpiother", "'function'", '"function"', "'name'")  # texts that a mark must not contain
_THOUGHT_ENDS = ("</think>", "<|END_THINKING|>")  # tags that some templates write before calls without reasoning


@dataclass(frozen=True)
class CallMarks:
    """The texts around the parts of a call; white space at their ends is significant only next to a value.

    Attributes:
        kind: "object" if a call is one JSON object or all are an array of them, "json" if the arguments are an object
            after the name, "tags" if each value is raw text between marks, "values" if strings are quoted.
        section, section_end: before the first call and after the last.
        opening: before the name, or before the JSON of an "object".
        name_end: after the name.
        key_open, key_end: before and after the key of an argument.
        string_end: `key_end` for values that are strings, which some templates mark.
        value_end: after each value.
        between: between two arguments.
        closing: after the arguments.
        separator: between two calls.
        quote: around strings of "values".
        array: whether all calls of kind "object" are one array.
        name_key, arguments_key: the fields of an "object".
        id_key: the field of an "object" for the call's id, before the other two; empty if there is none.
    """

    kind: Kind
    section: str = ""
    opening: str = ""
    name_end: str = ""
    key_open: str = ""
    key_end: str = ""
    string_end: str = ""
    value_end: str = ""
    between: str = ""
    closing: str = ""
    separator: str = ""
    section_end: str = ""
    quote: str = ""
    array: bool = False
    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = ""

    @property
    def beginnings(self) -> tuple[str, ...]:
        """The texts with which a call may begin, the most usual first. The last tag before the name is included."""
        last = atoms(self.opening.strip())[-1:] or [""]
        inner = last[0] if last[0].startswith("<") and not last[0].endswith(">") else ""
        opening = self.opening.strip()
        tagged = opening if opening.startswith(_TAG) or not self.section else ""
        return tuple(dict.fromkeys(filter(None, (self.section.strip(), tagged, inner))))

    @property
    def whole(self) -> str:
        """All marks, to find the control tokens in them."""
        parts = (self.section, self.opening, self.name_end, self.key_open, self.key_end, self.string_end)
        after = (self.value_end, self.between, self.closing, self.separator, self.section_end, self.quote)
        return "\n".join((*parts, *after))


def atoms(text: str) -> list[str]:
    """Return the indivisible parts of a mark: tags, runs of white space, and single other characters."""
    return _ATOM.findall(text)


def learn(show: Show, several: bool, with_text: bool) -> CallMarks | None:
    """Return the marks around calls, or None if the template's renderings do not show them.

    Args:
        show: a function that renders a conversation with an answer's text and its calls.
        several: whether the template shows several calls of a message.
        with_text: whether a message may have both text and calls.
    """
    plain = show(_ANSWER, ())
    calls = [_FIRST, _SECOND] if several else [_FIRST]
    text = show(_ANSWER if with_text else None, calls)
    for id_ in IDS:
        text = text.replace(id_, ANY)
    name, key = text.find(_FIRST[0]), text.find("tpikeya")
    if name < 0 or key < 0:
        return None
    answer = text.find(_ANSWER)
    start = answer + len(_ANSWER) if 0 <= answer < name else len(_prefix(text, plain))
    for tag in _THOUGHT_ENDS:
        start = max(start, text.rfind(tag, start, name) + len(tag) if text.rfind(tag, start, name) >= 0 else 0)
    end = _turn_end(plain)
    found = _object(text, start, name, several, end) or _named(text, start, several, end)
    if found is None or not found.beginnings or (end and end in "".join(found.beginnings)):
        return None
    return None if any(word in found.whole for word in _STRANGE) else found


def learn_reasoning(plain: str, shown: str, thought: str, answer: str) -> tuple[str, str] | None:
    """Return the tags around the text `thought` before `answer` in the conversation `shown`; None if there are none.

    `plain` is the same conversation without `thought`. If a tag stands before the answer in `plain` too, it does not
    open the reasoning. The opening tag is then derived from the closing one.
    """
    at = shown.find(thought)
    before, after = shown[: max(at, 0)].rstrip(), shown[at + len(thought) : max(shown.find(answer), 0)].strip()
    opening, closing = next(iter(atoms(before)[::-1]), ""), after
    if not (opening.startswith(_TAG) and closing.startswith(_TAG)) or len(atoms(closing)) > 1:
        return None
    if plain[: plain.find(answer)].rstrip().endswith(opening):
        return (closing.replace("/", "", 1), closing) if "/" in closing else None
    return opening, closing


def _turn_end(plain: str) -> str:
    tags = (one for one in atoms(plain[plain.find(_ANSWER) + len(_ANSWER) :]) if one.startswith(_TAG))
    return next(tags, "")


def _object(text: str, start: int, name: int, several: bool, end: str) -> CallMarks | None:
    """Return the marks around JSON objects that hold the name and the arguments, or around an array of them.

    Return None if the calls are not written in this way. `start` is the index in the rendering `text` at which the
    calls begin, `name` the index of the first call's name, and `end` the mark that ends the turn.
    """
    found = next(_values(text, start, name), None)
    if found is None:
        return None
    value, first, after = found
    array = isinstance(value, list)
    one = value[0] if array and value else value
    fields = _fields(one)
    if fields is None:
        return None
    before, rest = text[start:first], text[after:]
    opening, separator = before, ""
    if several and not array:
        second = next(_values(text, after, text.find(_SECOND[0], after)), None)
        if second is None:
            return None
        middle, rest = text[after : second[1]], text[second[2] :]
        opening, separator = _suffix(before, middle), middle[: len(middle) - len(_suffix(middle, before))]
    closing = _clipped(rest, end)
    section, section_end = before[: len(before) - len(opening)], ""
    if section.strip():  # the marks of all calls differ from those of each
        common = _prefix(separator, closing)
        closing, separator, section_end = common, separator[len(common) :], closing[len(common) :]
    else:
        opening, section, separator = before, "", ""
    return CallMarks(
        "object", section, opening, closing=closing, separator=separator, section_end=section_end, array=array,
        name_key=fields[0], arguments_key=fields[1], id_key=fields[2],
    )  # fmt: skip


def _fields(one: Any) -> tuple[str, str, str] | None:
    """Return the names of a call's fields for the name, the arguments and the id; None if `one` is not a call."""
    if not isinstance(one, dict):
        return None
    function = one.get("function")
    inner = function if isinstance(function, dict) else one
    name = next((key for key, value in inner.items() if value == _FIRST[0]), None)
    arguments = (key for key, value in inner.items() if value == _FIRST[1] or value == json.dumps(_FIRST[1]))
    if name is None:
        return ("", "", "") if one == {_FIRST[0]: _FIRST[1]} else None
    first = next(iter(one))
    return name, next(arguments, "arguments"), first if isinstance(one[first], str) and first != name else ""


def _values(text: str, start: int, inside: int) -> Iterator[tuple[Any, int, int]]:
    """Yield each JSON value that begins at `start` or later and contains the index `inside`, with its bounds."""
    for found in re.finditer(r"[\[{]", text[start:inside]):
        first = start + found.start()
        try:
            value, after = json.JSONDecoder(strict=False).raw_decode(text, first)
        except (ValueError, RecursionError):
            continue
        if after > inside:
            yield value, first, after


def _named(text: str, start: int, several: bool, end: str) -> CallMarks | None:
    """Return the marks around a name that is followed by arguments; None if the calls are not written in this way.

    Arguments as for `_object`.
    """
    name = text.rfind(_FIRST[0], start, text.find("tpikeya", start))
    if name < 0:
        return None
    before, at = text[start:name], name + len(_FIRST[0])
    value, first, after = next(_values(text, at, text.find("tpikeya", at)), (None, 0, 0))
    if value == _FIRST[1]:
        marks = CallMarks("json", name_end=text[at:first])
    else:
        found = _arguments(text, at)
        if found is None:
            return None
        marks, after = found
    return _around(marks, text, before, after, several, end)


def _arguments(text: str, at: int) -> tuple[CallMarks, int] | None:
    """Return the marks around arguments that are not JSON, and the index after the last value; None if not found."""
    pieces, place = list[str](), at
    for word in ("tpikeya", "tpivalue", "tpikeyb", "41973", "tpikeyc", "tpifinal"):
        found = text.find(word, place)
        if found < 0:
            return None
        pieces.append(text[place:found].replace("tpikeya", KEY).replace("tpikeyb", KEY).replace("tpikeyc", KEY))
        place = found + len(word)
    head, string, after_string, number, after_number, _ = pieces
    rest = re.split(_SECOND[0], text[place:], maxsplit=1)[0].replace("tpikeyc", KEY)
    quote = string[len(number) :] if string.startswith(number) else ""
    quoted = bool(quote) and after_string.startswith(quote) and not after_number.startswith(quote)
    if quoted:
        after_string, rest, place, string = after_string[len(quote) :], rest[len(quote) :], place + len(quote), number
    value_end = _prefix(after_string, rest)
    between = after_string[len(value_end) :]
    key_open = _suffix(head, between)
    if not quoted and not value_end.strip():
        return None
    marks = CallMarks(
        "values" if quoted else "tags", name_end=head[: len(head) - len(key_open)], key_open=key_open,
        key_end=number if quoted else _generalised(string, number), string_end=string, value_end=value_end,
        between=between[: len(between) - len(key_open)], quote=quote if quoted else "",
    )  # fmt: skip
    return marks, place + len(value_end.replace(KEY, "tpikeyc"))


def _around(marks: CallMarks, text: str, before: str, after: int, several: bool, end: str) -> CallMarks | None:
    """Return `marks` with the marks before the name and after the arguments added; None if these are not found.

    `before` is the text before the first call's name, `after` the index in `text` at which its arguments end.
    """
    opening, section, separator, section_end, name_end = before, "", "", "", marks.name_end
    if several:
        second = text.find(_SECOND[0], after)
        last = text.find("tpilast", second)
        if second < 0 or last < 0:
            return None
        middle = text[after:second]
        opening = _suffix(before, middle)
        section, middle = before[: len(before) - len(opening)], middle[: len(middle) - len(_suffix(middle, before))]
        own_end = text[second + len(_SECOND[0]) : text.find("tpikeya", second)]
        tail = text[last + len("tpilast") :]
        if marks.kind == "json":
            value = next(_values(text, second, text.find("tpikeya", second)), None)
            if value is None:
                return None
            own_end, tail = text[second + len(_SECOND[0]) : value[1]], text[value[2] :]
            name_end = _generalised(name_end, own_end)
        else:
            name_end = _generalised(name_end + marks.key_open, own_end)
            name_end = name_end[: len(name_end) - len(marks.key_open)]
            tail = tail.removeprefix(marks.quote).removeprefix(marks.value_end.replace(KEY, "tpikeya"))
        closing = _prefix(middle, tail)
        separator, section_end = middle[len(closing) :], _clipped(tail[len(closing) :], end) if section.strip() else ""
    else:
        closing = _clipped(text[after:], end)
    known = {key: value for key, value in vars(marks).items() if key not in ("section", "opening")}
    known |= {"closing": closing, "separator": separator, "section_end": section_end, "name_end": name_end}
    return CallMarks(section=section, opening=opening, **known)


def _clipped(rest: str, end: str) -> str:
    """Return the part of `rest`, the text after a call, up to the end of the turn."""
    stop = [place for word in (end, "tpiresult", "tpiuser") if word and (place := rest.find(word)) >= 0]
    clipped = rest[: min(stop)] if stop else rest
    found = atoms(clipped.rstrip())
    tags = [place for place, one in enumerate(found) if one.startswith(_TAG)]
    if stop and not (end and rest.find(end) == min(stop)) and tags:  # a header of the next turn follows
        found = found[: tags[0] + 1]
    return "".join(found)


def _generalised(one: str, other: str) -> str:
    """Return a mark that matches both texts: the word that differs between them becomes ANY."""
    if one == other:
        return one
    first = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
    short = min(len(one), len(other)) - first
    last = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one[::-1], other[::-1], strict=False))))
    after = one[len(one) - min(last, short) :]
    return re.sub(r"\w+$", "", one[:first]) + ANY + re.sub(r"^\w+", "", after)


def _same(one: str, other: str) -> bool:
    return one == other or (one.isspace() and other.isspace())


def _prefix(one: str, other: str) -> str:
    """Return the longest beginning that two texts have in common, in whole atoms."""
    pairs = zip(atoms(one), atoms(other), strict=False)
    return "".join(pair[0] for pair in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _suffix(one: str, other: str) -> str:
    """Return the longest end that two texts have in common, in whole atoms, as `one` has it.

    All white space counts as equal.
    """
    pairs = zip(reversed(atoms(one)), reversed(atoms(other)), strict=False)
    common = [pair[0] for pair in takewhile(lambda pair: _same(*pair), pairs)]
    return "".join(reversed(common))

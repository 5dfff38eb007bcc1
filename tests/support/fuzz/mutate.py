"""Mutations of well-formed inputs, drawn from a seed: input `number` is the same in every run."""

import random
import re
import struct
from collections.abc import Callable, Sequence

Parts = tuple[bytes, ...]  # the frames of a message; one for a file

_NUMBERS = (0, 1, -1, 127, 128, 255, 256, 1 << 15, (1 << 16) - 1, 1 << 24, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 40,
            1 << 62, (1 << 63) - 1, -(1 << 31), -(1 << 63))  # fmt: skip
_FORMS = ("<b", "<h", "<i", "<q", ">h", ">i", ">q")
_WORDS = (b"[", b"]", b"{", b"}", b'"', b",", b"null", b"true", b"-1", b"1e999", b"9" * 40, b"../", b"\0", b"\xff\xfe",
          b"{%", b"%}", b"{{", b"}}", b"{% for x in messages %}", b"{% endfor %}", b"range(99999)", b"|join",
          b"* 99999", b"\xed\xa0\x80", b"\\ud800", b"__class__", b"%s")  # fmt: skip
_MOST_BYTES = 1 << 16  # of one part: larger ones are the business of the bounds' own tests
_DIGITS = re.compile(rb"\d+")


def mutated(seeds: Sequence[Parts], name: str, number: int) -> Parts:
    """Return input `number` of the family `name`: one of `seeds`, changed in one to six places."""
    drawn = random.Random(f"{name} {number}")
    parts = [bytearray(part) for part in drawn.choice(seeds)]
    for _ in range(drawn.choice((1, 1, 1, 2, 3, 6))):
        drawn.choice(_CHANGES)(parts, seeds, drawn)
    return tuple(bytes(part[:_MOST_BYTES]) for part in parts)


Change = Callable[[list[bytearray], Sequence[Parts], random.Random], None]


def _one(parts: list[bytearray], drawn: random.Random) -> tuple[bytearray, int]:
    """Draw a part to change, with a probability in proportion to its length, and a place in the part."""
    if not parts:
        parts.append(bytearray())
    part = drawn.choices(parts, [len(part) + 1 for part in parts])[0]
    return part, drawn.randrange(len(part) + 1)


def _flip(parts: list[bytearray], seeds: Sequence[Parts], drawn: random.Random) -> None:
    part, at = _one(parts, drawn)
    if at < len(part):
        part[at] ^= 1 << drawn.randrange(8)


def _byte(parts: list[bytearray], seeds: Sequence[Parts], drawn: random.Random) -> None:
    part, at = _one(parts, drawn)
    part[at : at + 1] = bytes((drawn.randrange(256),))


def _number(parts: list[bytearray], seeds: Sequence[Parts], drawn: random.Random) -> None:
    """Replace some bytes by an extreme number."""
    part, at = _one(parts, drawn)
    form, number = drawn.choice(_FORMS), drawn.choice(_NUMBERS)
    size = struct.calcsize(form)
    part[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, "big" if form[0] == ">" else "little")


def _digits(parts: list[bytearray], seeds: Sequence[Parts], drawn: random.Random) -> None:
    """Replace a number in decimal digits by an extreme number."""
    part, _ = _one(parts, drawn)
    if found := list(_DIGITS.finditer(part)):
        match = drawn.choice(found)
        part[match.start() : match.end()] = str(drawn.choice(_NUMBERS)).encode()


def _word(parts: list[bytearray], seeds: Sequence[Parts], drawn: random.Random) -> None:
    part, at = _one(parts, drawn)
    part[at:at] = drawn.choice(_WORDS)


def _cut(parts: list[bytearray], seeds: Sequence[Parts], drawn: random.Random) -> None:
    part, at = _one(parts, drawn)
    del part[at : drawn.choice((len(part), at + drawn.randrange(1, 33)))]


def _again(parts: list[bytearray], seeds: Sequence[Parts], drawn: random.Random) -> None:
    """Repeat a piece of the input once or many times."""
    part, at = _one(parts, drawn)
    piece = part[at : at + drawn.randrange(1, 200)]
    part[at:at] = piece * drawn.choice((1, 1, 2, 50))


def _splice(parts: list[bytearray], seeds: Sequence[Parts], drawn: random.Random) -> None:
    """Insert a piece of another seed."""
    part, at = _one(parts, drawn)
    other = drawn.choice(seeds)
    if other:
        source = drawn.choice(other)
        first = drawn.randrange(len(source) + 1)
        piece = source[first : first + drawn.randrange(1, 200)]
        part[at : at + drawn.choice((0, len(piece)))] = piece


def _frames(parts: list[bytearray], seeds: Sequence[Parts], drawn: random.Random) -> None:
    """Add or remove a part of a message, or empty a file."""
    if len(parts) > 1 and drawn.random() < 0.5:
        del parts[drawn.randrange(len(parts))]
    elif len(parts) > 1:
        parts.insert(drawn.randrange(len(parts) + 1), bytearray(drawn.choice(parts)))
    elif parts and drawn.random() < 0.05:
        parts[0].clear()


_CHANGES: tuple[Change, ...] = (
    _flip, _flip, _byte, _byte, _number, _number, _digits, _word, _cut, _again, _splice, _frames,
)  # fmt: skip

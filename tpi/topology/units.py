"""Parsers for numbers with units in topology files: rates in bits, disk speeds in bytes, times, percentages."""

import re

from tpi.text import short_number

_NUMBER = r"\s*([0-9]+(?:\.[0-9]+)?)\s*"
_BARE = re.compile(_NUMBER)
_RATE = re.compile(_NUMBER + r"([KMG])(?:bit(?:/s)?|bps)\s*", re.IGNORECASE)
_DISK = re.compile(_NUMBER + r"([KMG])B/s\s*", re.IGNORECASE)
_TIME = re.compile(_NUMBER + r"(us|ms|s)\s*", re.IGNORECASE)
_PERCENT = re.compile(_NUMBER + r"%\s*")
_PREFIX = {"K": 1e3, "M": 1e6, "G": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_MOST = 1e15  # bits or bytes per second
_MOST_SECONDS = 86400.0


def parse_rate(text: str) -> float:
    """Return the bits per second meant by `300 Mbit` or `1 Gbit/s`. Raises ValueError."""
    return _parse(text, _RATE, _PREFIX, ("rate", "Mbit", "Gbit", "300 Mbit or 1 Gbit"), _MOST)


def parse_disk(text: str) -> float:
    """Return the bytes per second meant by `500 MB/s`. Raises ValueError."""
    return _parse(text, _DISK, _PREFIX, ("disk speed", "MB/s", "GB/s", "500 MB/s"), _MOST)


def parse_time(text: str) -> float:
    """Return the seconds meant by `1 ms`, `250 us` or `0.1 s`, at most a day. Raises ValueError."""
    return _parse(text, _TIME, _SECONDS, ("time", "ms", "s", "1 ms or 250 us"), _MOST_SECONDS)


def parse_percent(text: str) -> float:
    """Return the fraction in [0, 1] meant by `0.5%`. Raises ValueError."""
    match = _PERCENT.fullmatch(text)
    if match is None or float(match.group(1)) > 100:
        raise ValueError(f"{text!r} is not a percentage; write for example 0.5%")
    return float(match.group(1)) / 100


def format_rate(bits: float) -> str:
    """Return a rate as text: `300 Mbit` for 3e8, `unlimited` for infinity."""
    if bits == float("inf"):
        return "unlimited"
    for name, size in (("Gbit", 1e9), ("Mbit", 1e6)):
        if bits >= size:
            return f"{short_number(bits / size, 4)} {name}"
    return f"{short_number(bits / 1e3, 4)} kbit"


def _parse(
    text: str, pattern: re.Pattern[str], factors: dict[str, float], words: tuple[str, str, str, str], most: float
) -> float:
    """Return the number in `text` times the factor of its unit.

    `words` are for messages: the kind of number, two units to choose from, and examples.

    Raises:
        ValueError: if `text` is not a number with a unit, or is more than `most`.
    """
    kind, smaller, larger, examples = words
    if bare := _BARE.fullmatch(text):
        number = bare.group(1)
        raise ValueError(f"{text!r} has no unit; do you mean {number} {smaller} or {number} {larger}?")
    match = pattern.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a {kind}; write for example {examples}")
    unit = match.group(2)
    value = float(match.group(1)) * (factors.get(unit.lower()) or factors[unit.upper()])
    if value > most:
        raise ValueError(f"{text!r} is too large for a {kind}; write for example {examples}")
    return value

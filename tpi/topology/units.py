"""Numbers with units as a topology file writes them: rates in bits, disk speeds in bytes, times, percentages."""

import re
from collections.abc import Callable

_NUMBER = r"^\s*(\d+(?:\.\d+)?)\s*"
_RATE = re.compile(_NUMBER + r"([KMG])(?:bit(?:/s)?|bps)\s*$", re.IGNORECASE)
_DISK = re.compile(_NUMBER + r"([KMG])B/s\s*$", re.IGNORECASE)
_TIME = re.compile(_NUMBER + r"(us|ms|s)\s*$")
_PERCENT = re.compile(_NUMBER + r"%\s*$")
_PREFIX = {"K": 1e3, "M": 1e6, "G": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_rate(text: str) -> float:
    """Bits per second meant by `300 Mbit` or `1 Gbit/s`. Raises ValueError."""
    return _parse(text, _RATE, lambda unit: _PREFIX[unit.upper()], "a rate; write for example 300 Mbit or 1 Gbit")


def parse_disk(text: str) -> float:
    """Bytes per second meant by `500 MB/s`. Raises ValueError."""
    return _parse(text, _DISK, lambda unit: _PREFIX[unit.upper()], "a disk speed; write for example 500 MB/s")


def parse_time(text: str) -> float:
    """Seconds meant by `1 ms`, `250 us` or `0.1 s`. Raises ValueError."""
    return _parse(text, _TIME, _SECONDS.__getitem__, "a time; write for example 1 ms or 250 us")


def parse_percent(text: str) -> float:
    """Fraction in [0, 1] meant by `0.5%`. Raises ValueError."""
    match = _PERCENT.match(text)
    if match is None or float(match.group(1)) > 100:
        raise ValueError(f"{text!r} is not a percentage; write for example 0.5%")
    return float(match.group(1)) / 100


def format_rate(bits: float) -> str:
    """`300 Mbit` for 3e8, `unlimited` for infinity."""
    if bits == float("inf"):
        return "unlimited"
    for name, size in (("Gbit", 1e9), ("Mbit", 1e6)):
        if bits >= size:
            return f"{bits / size:.4g} {name}"
    return f"{bits / 1e3:.4g} kbit"


def _parse(text: str, pattern: re.Pattern[str], factor: Callable[[str], float], kind: str) -> float:
    match = pattern.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not {kind}")
    return float(match.group(1)) * factor(match.group(2))

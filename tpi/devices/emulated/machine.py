"""The description of an emulated machine: `6GiB,link=2GB/s,host=0.25`, or a preset with changes after it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tpi.config import parse_size
from tpi.devices.emulated.presets import PRESETS
from tpi.errors import UsageError

EMULATED = "emu:"
_EXAMPLE = "write for example emu:6GiB,link=2GB/s,host=0.25"
_NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
_RATE = re.compile(rf"{_NUMBER}\s*([KMGTP]?)(?:FLOPS|FLOP/s)?", re.IGNORECASE)
_SECONDS = re.compile(rf"{_NUMBER}\s*(s|ms|us|ns)", re.IGNORECASE)
_PER_SECOND = {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}
_NAME = re.compile(r"[A-Za-z][\w-]{0,31}")


@dataclass(frozen=True)
class EmulatedMachine:
    """An accelerator and the host around it; the defaults are the laptop of the PIPO paper.

    Attributes:
        capacity: bytes of the accelerator's memory.
        up, down: bytes per second of a copy to the accelerator, and from it.
        memory, flops: bytes per second of the accelerator's memory; its operations per second.
        host_memory, host_flops: the same of the host.
        disk: bytes per second of a read.
        ram: bytes of the host's memory, for planning; the emulation does not enforce it.
        latency: seconds before a copy's first byte.
        launch: seconds before a kernel computes, on the accelerator or the host.
        stretch: factor by which all durations are multiplied; None: found by calibration.
        name: name of the device in messages and traces; unique within a node.
    """

    capacity: int
    up: float = 12e9
    down: float = 12e9
    memory: float = 336e9
    flops: float = 22.8e12
    host_memory: float = 40e9
    host_flops: float = 0.6e12
    disk: float = 3e9
    ram: int = 16 << 30
    latency: float = 10e-6
    launch: float = 5e-6
    stretch: float | None = None
    name: str = "emu"

    def text(self) -> str:
        """Return the text that `parse_emulated` parses to this machine."""
        stretch = "auto" if self.stretch is None else repr(self.stretch)
        rates = (f"{name}={getattr(self, name)!r}" for name in ("up", "down", "memory", "host_memory", "disk"))
        others = (f"flops={self.flops!r},host_flops={self.host_flops!r},ram={self.ram}B,latency={self.latency!r}s",)
        end = f"launch={self.launch!r}s,stretch={stretch},name={self.name}"
        return ",".join([f"{self.capacity}B", *(f"{rate}B/s" for rate in rates), *others, end])


def parse_emulated(text: str) -> EmulatedMachine:
    """Return the machine that `text` describes: a capacity or a preset, then `name=value` pairs in any order.

    A specific name (`up`) overrides a general one (`link`).

    Raises:
        UsageError: if a name is unknown or given twice, a value is malformed, or the first word is neither.
    """
    first, *words = (word.strip() for word in text.split(","))
    if first in PRESETS:
        return _changed(parse_emulated(PRESETS[first]), words)
    if not first or "=" in first or not first[0].isdigit():
        raise UsageError(
            f"emu:{text} begins with neither the accelerator's memory nor one of {', '.join(PRESETS)}; {_EXAMPLE}"
        )
    return _changed(EmulatedMachine(_size("capacity", first)), words)


def part_of_emulated(name: str, count: int) -> str:
    """Return the device `name` with a host and disk that are one of `count` equal parts, if it is emulated.

    Any other device is returned unchanged. The accelerator keeps all of its speed and memory.

    Raises:
        UsageError: as for `parse_emulated`.
    """
    if count == 1 or not name.startswith(EMULATED):
        return name
    whole = parse_emulated(name.removeprefix(EMULATED))
    rates = {each: getattr(whole, each) / count for each in ("host_memory", "host_flops", "disk")}
    return EMULATED + replace(whole, ram=whole.ram // count, **rates).text()


def _changed(machine: EmulatedMachine, words: list[str]) -> EmulatedMachine:
    given: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in _READ:
            raise UsageError(f"an emulated device has no {word!r}; it has {', '.join(_READ)}, each as name=value")
        if name in given:
            raise UsageError(f"{name} is given twice for an emulated device; leave one of them out")
        given[name] = value
    read = {name: _READ[name](name, value) for name, value in given.items()}
    return replace(machine, **_resolved(machine, read))


def _resolved(machine: EmulatedMachine, read: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `machine` that the text changes; `read` has the values in the text, by name.

    `link` sets both directions. `host` is the factor from the accelerator's speeds to the host's.
    """
    fields = {name: value for name, value in read.items() if name not in ("link", "host")}
    if "link" in read:
        fields = {"up": read["link"], "down": read["link"], **fields}
    if "host" in read:
        memory, flops = fields.get("memory", machine.memory), fields.get("flops", machine.flops)
        fields = {"host_memory": read["host"] * memory, "host_flops": read["host"] * flops, **fields}
    return fields


def _size(name: str, text: str) -> int:
    size = parse_size(text, f"{name} of an emulated device")
    if size <= 0:
        raise UsageError(f"{name} of an emulated device must be positive, not {text}; {_EXAMPLE}")
    return size


def _speed(name: str, text: str) -> float:
    """Return the bytes per second that `text` states, such as `2GB/s`. `name` is the setting's name in errors."""
    digits, slash, _ = text.lower().partition("b/s")
    match = _RATE.fullmatch(digits) if slash else None
    if match is None and not re.fullmatch(rf"{_NUMBER}[kmgt]i", digits):
        raise UsageError(f"{name}={text} of an emulated device is not a speed; write for example {name}=2GB/s")
    value = _scaled(*match.groups()) if match else float(parse_size(digits + "B"))
    return _positive(name, text, value)


def _operations(name: str, text: str) -> float:
    """Return the operations per second that `text` states, such as `12T` or `12TFLOPS`. `name` is for errors."""
    match = _RATE.fullmatch(text)
    if match is None:
        raise UsageError(f"{name}={text} of an emulated device is not a speed; write for example {name}=12TFLOPS")
    return _positive(name, text, _scaled(*match.groups()))


def _scaled(number: str, prefix: str) -> float:
    return float(number) * 1000.0 ** (" KMGTP".index(prefix.upper()) if prefix else 0)


def _seconds(name: str, text: str) -> float:
    match = _SECONDS.fullmatch(text)
    if match is None:
        raise UsageError(f"{name}={text} of an emulated device is not a time; write for example {name}=10us")
    return float(match[1]) / _PER_SECOND[match[2].lower()]


def _share(name: str, text: str) -> float:
    match = re.fullmatch(_NUMBER, text)
    if match is None:
        raise UsageError(f"{name}={text} of an emulated device is not a number; write for example {name}=0.25")
    return _positive(name, text, float(text))


def _positive(name: str, text: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise UsageError(f"{name}={text} of an emulated device must be positive and finite")
    return value


def _stretch(name: str, text: str) -> float | None:
    return None if text == "auto" else _share(name, text)


def _named(name: str, text: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise UsageError(f"{name}={text} is not a device name; use at most 32 letters, digits, - and _")
    return text


_READ: dict[str, Callable[[str, str], Any]] = {
    "link": _speed,
    "up": _speed,
    "down": _speed,
    "memory": _speed,
    "flops": _operations,
    "host": _share,
    "host_memory": _speed,
    "host_flops": _operations,
    "disk": _speed,
    "ram": _size,
    "latency": _seconds,
    "launch": _seconds,
    "stretch": _stretch,
    "name": _named,
}

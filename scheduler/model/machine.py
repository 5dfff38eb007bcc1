"""What one node computes with, as figures: rates, links, memory. Bytes, seconds, operations; nothing is measured here.

`parse_machine` reads them from words such as `8GiB GPU, 16GiB RAM, 2GB/s disk`; what they leave out is a laptop's.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import numpy.typing as npt

from tpi.config import parse_size
from tpi.devices.emulated.machine import EmulatedMachine
from tpi.errors import UsageError
from tpi.kv import KvDtype

Number = float | npt.NDArray[np.float64]
GIB = 1 << 30
PIECES = tuple(1 << power for power in range(16, 27, 2))  # bytes of transfers whose speeds are compared
SHARERS = 4  # query heads with which keys and values are attended to where that is measured: Mixtral's
GOOD_ENOUGH = 0.95  # of the best speed, for transfers in smaller pieces
EXAMPLE = "8GiB GPU, 16GiB RAM, 2GB/s disk"


@dataclass(frozen=True)
class KvRates:
    """Bytes of keys and values per second that attention of new tokens goes over while caches hold them, by format.

    Measured with `SHARERS` query heads for each head of keys and values; with more of them it is slower by as much.
    """

    f32: float
    f16: float
    q8: float
    q4: float

    def seconds(self, kv_dtype: KvDtype, nbytes: Number, sharers: float) -> Number:
        """Of attending to `nbytes`, each of them with so many query heads."""
        rate: float = getattr(self, kv_dtype)
        return nbytes / rate * max(1.0, sharers / SHARERS)

    def times(self, factor: float) -> "KvRates":
        """The same, so many times as fast."""
        return KvRates(*(factor * rate for rate in (self.f32, self.f16, self.q8, self.q4)))


@dataclass(frozen=True)
class Rates:
    """How fast a device computes: it reads what it needs, and does what is to be done; the slower of the two counts."""

    read: float  # bytes per second of weights, keys and values, for few tokens at once
    operations: float  # floating-point operations per second, for many tokens at once
    start: float = 0.0  # seconds that every call takes beside that
    kv: KvRates | None = None  # what is done of attention; None: nothing is known to be slower than reading

    def seconds(self, nbytes: float, operations: float) -> float:
        """Of what reads `nbytes` and does `operations` with them: the roofline (Williams et al., 2009)."""
        return max(nbytes / self.read, operations / self.operations)


@dataclass(frozen=True)
class DeviceLink:
    """What joins the host's memory to an accelerator's; both directions work at once."""

    up: float  # bytes per second to the accelerator
    down: float  # bytes per second from it
    latency: float = 0.0  # seconds that every transfer takes beside that
    piece: int = 1 << 20  # bytes of the smallest transfers that are about as fast: what is read goes on in such pieces


@dataclass(frozen=True)
class DiskRate:
    """How fast weights come from the disk into memory."""

    read: float  # bytes per second
    latency: float = 0.0  # seconds before the first of them


@dataclass(frozen=True)
class Accelerator:
    """A device in addition to the host; `memory` in bytes, of its own, or `shared`: part of the host's."""

    rates: Rates
    memory: int
    link: DeviceLink
    name: str = "GPU"
    shared: bool = False


@dataclass(frozen=True)
class NodeMachine:
    """One node: the host with its memory in bytes, its disk, an accelerator if it has one, and more of them."""

    host: Rates
    memory: int
    disk: DiskRate
    accelerator: Accelerator | None = None
    bus: float = inf  # bytes per second of the host's memory, which computing, transfers and the disk share
    more: tuple[Accelerator, ...] = ()  # each with a link of its own

    @property
    def cards(self) -> tuple[Accelerator, ...]:
        """All accelerators, in the order in which they were named."""
        return () if self.accelerator is None else (self.accelerator, *self.more)

    @property
    def shared(self) -> bool:
        """Whether an accelerator takes its memory from the host's."""
        return any(card.shared for card in self.cards)

    def with_cards(self, change: Callable[[Accelerator], Accelerator]) -> "NodeMachine":
        """The same with every accelerator changed."""
        changed = [change(card) for card in self.cards]
        return replace(self, accelerator=changed[0], more=tuple(changed[1:])) if changed else self


def emulated_node(machine: EmulatedMachine, *more: EmulatedMachine) -> NodeMachine:
    """The node that an emulation plays: its lanes share nothing, so there is no bus.

    `more` are further accelerators; host and disk are the first one's.
    """
    host = Rates(machine.host_memory, machine.host_flops, machine.launch)
    device, *others = (_emulated_card(each) for each in (machine, *more))
    return NodeMachine(host, machine.ram, DiskRate(machine.disk), device, more=tuple(others))


def _emulated_card(machine: EmulatedMachine) -> Accelerator:
    link = DeviceLink(machine.up, machine.down, machine.latency, good_piece(machine.up, machine.latency))
    return Accelerator(Rates(machine.memory, machine.flops, machine.launch), machine.capacity, link, machine.name)


def good_piece(rate: float, latency: float) -> int:
    """Bytes of the smallest transfers, of those that are compared (`PIECES`), that take `GOOD_ENOUGH` of the rate."""
    fast = (size for size in PIECES if size >= GOOD_ENOUGH * (size + latency * rate))
    return next(fast, PIECES[-1])


LAPTOP = emulated_node(EmulatedMachine(6 * GIB))  # of the PIPO paper; `tpi.devices.emulated.presets` has the sources

_PHRASE = re.compile(r"([\d.]+ ?[KMGTP]?i?(?:B/s|FLOP/s|B)) (GPU|CPU|RAM|disk|link)", re.IGNORECASE)
_THINGS = {"B": ("gpu", "ram"), "B/s": ("gpu", "ram", "disk", "link"), "FLOP/s": ("gpu", "cpu")}


def parse_machine(text: str) -> NodeMachine:
    """The machine that phrases describe, with commas between them: amounts of `GPU` and `RAM`, and rates.

    Rates are bytes per second (`300GB/s GPU`, `40GB/s RAM`, `12GB/s link`, `2GB/s disk`) or operations per second
    (`10TFLOP/s GPU`, `500GFLOP/s CPU`). What is left out is taken from `LAPTOP`; a machine of which no `GPU` is named
    has none. What the host reads, copies and loads shares its memory.

    Raises:
        UsageError: if a phrase means nothing, is given twice, or is zero.
    """
    found: dict[tuple[str, str], int] = {}
    for part in text.split(","):
        key, value = _phrase(" ".join(part.split()))
        if key in found or not value:
            wrong = "is given twice" if key in found else "is nothing to plan with"
            raise UsageError(f"{part.strip()!r} {wrong}; write for example {EXAMPLE!r}")
        found[key] = value
    host = _rates(LAPTOP.host, found, "ram", "cpu")
    disk = replace(LAPTOP.disk, read=float(found.get(("disk", "B/s"), LAPTOP.disk.read)))
    return NodeMachine(host, found.get(("ram", "B"), LAPTOP.memory), disk, _accelerator(found), host.read)


def _accelerator(found: dict[tuple[str, str], int]) -> Accelerator | None:
    if not any(thing == "gpu" for thing, _ in found):
        return None
    device = laptop_gpu()
    speed = float(found.get(("link", "B/s"), device.link.up))
    return Accelerator(
        _rates(device.rates, found, "gpu", "gpu"),
        found.get(("gpu", "B"), device.memory),
        replace(device.link, up=speed, down=speed, piece=good_piece(speed, device.link.latency)),
    )


def laptop_gpu() -> Accelerator:
    """The accelerator of `LAPTOP`."""
    assert LAPTOP.accelerator is not None
    return LAPTOP.accelerator


def _rates(default: Rates, found: dict[tuple[str, str], int], memory: str, computing: str) -> Rates:
    read, operations = found.get((memory, "B/s")), found.get((computing, "FLOP/s"))
    return replace(default, read=float(read or default.read), operations=float(operations or default.operations))


def _phrase(part: str) -> tuple[tuple[str, str], int]:
    """What an amount is of, its unit (`B`, `B/s` or `FLOP/s`), and how much it is."""
    match = _PHRASE.fullmatch(part)
    amount, thing = match.groups() if match else ("", "")
    for unit in ("FLOP/s", "B/s", "B"):
        if amount.lower().endswith(unit.lower()) and thing.lower() in _THINGS[unit]:
            return (thing.lower(), unit), parse_size(amount[: -len(unit)] + "B")
    raise UsageError(f"{part!r} is no part of a machine; write for example {EXAMPLE!r}")

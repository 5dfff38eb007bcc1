"""The hardware of one node as figures: rates, links and memory, in bytes, seconds and operations.

Nothing is measured here. `parse_machine` reads the figures from words such as `8GiB GPU, 16GiB RAM, 2GB/s disk`;
figures that are left out are a laptop's.
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
from tpi.kernels.kv import KvDtype

Number = float | npt.NDArray[np.float64]
GIB = 1 << 30
PIECES = tuple(1 << power for power in range(16, 27, 2))  # bytes of transfers whose speeds are compared
SHARERS = 4  # query heads for each key and value head in measurements of attention: those of Mixtral
GOOD_ENOUGH = 0.95  # share of the best speed that a transfer size must reach; the smallest such size is chosen
EXAMPLE = "8GiB GPU, 16GiB RAM, 2GB/s disk"


@dataclass(frozen=True)
class KvRates:
    """Speeds of attention, in bytes of keys and values per second that lie in the processor's caches, by number format.

    The rates are measured for new tokens with `SHARERS` query heads for each key and value head; more query heads are
    proportionally slower.
    """

    f32: float
    f16: float
    q8: float
    q4: float

    def seconds(self, kv_dtype: KvDtype, nbytes: Number, sharers: float) -> Number:
        """Return the seconds of attention over `nbytes` bytes of keys and values in the format `kv_dtype`.

        `sharers` is the number of query heads for each key and value head.
        """
        rate: float = getattr(self, kv_dtype)
        return nbytes / rate * max(1.0, sharers / SHARERS)

    def scaled(self, factor: float) -> "KvRates":
        """Return rates that are `factor` times as fast."""
        return KvRates(*(factor * rate for rate in (self.f32, self.f16, self.q8, self.q4)))


@dataclass(frozen=True)
class Rates:
    """How fast a device computes. It reads and computes at the same time, so the slower of the two decides."""

    read: float  # bytes per second of weights, keys and values, for few tokens at once
    operations: float  # floating-point operations per second, for many tokens at once
    start: float = 0.0  # additional seconds of every call
    kv: KvRates | None = None  # speed of attention from caches; None: assume that reading limits it

    def seconds(self, nbytes: float, operations: float) -> float:
        """Return the seconds to read `nbytes` and do `operations` with them: the roofline (Williams et al., 2009)."""
        return max(nbytes / self.read, operations / self.operations)


@dataclass(frozen=True)
class DeviceLink:
    """The link between the host's memory and an accelerator's; both directions work at the same time."""

    up: float  # bytes per second to the accelerator
    down: float  # bytes per second from it
    latency: float = 0.0  # additional seconds of every transfer
    piece: int = 1 << 20  # bytes of the smallest transfers at about full speed; streamed weights move in such pieces


@dataclass(frozen=True)
class DiskRate:
    """The speed at which weights come from the disk into memory."""

    read: float  # bytes per second
    latency: float = 0.0  # seconds before the first byte


@dataclass(frozen=True)
class Accelerator:
    """A device in addition to the host. It has `memory` bytes of its own or, if `shared`, of the host's."""

    rates: Rates
    memory: int
    link: DeviceLink
    name: str = "GPU"
    shared: bool = False
    follow: float | None = None
    """Additional seconds of a block that follows another one in a chain; None if the device's kernels have no chains.

    `rates.start` and the link's latency count once for the whole chain.
    """


@dataclass(frozen=True)
class NodeMachine:
    """One node: the host with its memory in bytes, its disk, and its accelerators, if any."""

    host: Rates
    memory: int
    disk: DiskRate
    accelerator: Accelerator | None = None
    bus: float = inf  # bytes per second of the host's memory, which computing, transfers and the disk share
    more: tuple[Accelerator, ...] = ()  # further accelerators, each with its own link

    @property
    def cards(self) -> tuple[Accelerator, ...]:
        """All accelerators, in the order in which they were named."""
        return () if self.accelerator is None else (self.accelerator, *self.more)

    @property
    def shared(self) -> bool:
        """True if an accelerator takes its memory from the host's."""
        return any(card.shared for card in self.cards)

    def with_cards(self, change: Callable[[Accelerator], Accelerator]) -> "NodeMachine":
        """Return the same machine with `change` applied to every accelerator."""
        changed = [change(card) for card in self.cards]
        return replace(self, accelerator=changed[0], more=tuple(changed[1:])) if changed else self


def emulated_node(machine: EmulatedMachine, *more: EmulatedMachine) -> NodeMachine:
    """Return the node that an emulated machine represents, as figures for the cost model.

    `more` are further accelerators; the host and the disk are those of `machine`. The bus has no limit, because
    emulated devices do not slow each other down.
    """
    host = Rates(machine.host_memory, machine.host_flops, machine.launch)
    device, *others = (_emulated_card(each) for each in (machine, *more))
    return NodeMachine(host, machine.ram, DiskRate(machine.disk), device, more=tuple(others))


def _emulated_card(machine: EmulatedMachine) -> Accelerator:
    link = DeviceLink(machine.up, machine.down, machine.latency, good_piece(machine.up, machine.latency))
    rates = Rates(machine.memory, machine.flops, machine.launch)
    return Accelerator(rates, machine.capacity, link, machine.name, follow=machine.launch)


def good_piece(rate: float, latency: float) -> int:
    """Return the smallest transfer size in `PIECES` that reaches `GOOD_ENOUGH` of the link's `rate`, in bytes.

    If none does, return the largest size. `latency` is in seconds, `rate` in bytes per second.
    """
    fast = (size for size in PIECES if size >= GOOD_ENOUGH * (size + latency * rate))
    return next(fast, PIECES[-1])


LAPTOP = emulated_node(EmulatedMachine(6 * GIB))  # PIPO's laptop; `tpi.devices.emulated.presets` has the sources

_PHRASE = re.compile(r"([\d.]+ ?[KMGTP]?i?(?:B/s|FLOP/s|B)) (GPU|CPU|RAM|disk|link)", re.IGNORECASE)
_THINGS = {"B": ("gpu", "ram"), "B/s": ("gpu", "ram", "disk", "link"), "FLOP/s": ("gpu", "cpu")}


def parse_machine(text: str) -> NodeMachine:
    """Return the machine that a text describes: phrases with commas between them, such as `8GiB GPU, 2GB/s disk`.

    Phrases are amounts of `GPU` or `RAM` memory, or rates. Rates are bytes per second (`300GB/s GPU`, `40GB/s RAM`,
    `12GB/s link`, `2GB/s disk`) or operations per second (`10TFLOP/s GPU`, `500GFLOP/s CPU`). Figures that are left out
    are those of `LAPTOP`, but a machine has an accelerator only if a phrase names a `GPU`. Computing, transfers and the
    disk share the rate of the RAM.

    Raises:
        UsageError: if a phrase is not understood, is given twice, or is zero.
    """
    found: dict[tuple[str, str], int] = {}
    for part in text.split(","):
        key, value = _phrase(" ".join(part.split()))
        if key in found or not value:
            wrong = "is given twice" if key in found else "is zero"
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
        follow=device.rates.start,
    )


def laptop_gpu() -> Accelerator:
    """Return the accelerator of `LAPTOP`, without chains: figures for one that was not measured."""
    assert LAPTOP.accelerator is not None
    return replace(LAPTOP.accelerator, follow=None)


def _rates(default: Rates, found: dict[tuple[str, str], int], memory: str, computing: str) -> Rates:
    read, operations = found.get((memory, "B/s")), found.get((computing, "FLOP/s"))
    return replace(default, read=float(read or default.read), operations=float(operations or default.operations))


def _phrase(part: str) -> tuple[tuple[str, str], int]:
    """Parse a phrase such as `8GiB GPU`; return the thing with its unit (`B`, `B/s` or `FLOP/s`), and the amount."""
    match = _PHRASE.fullmatch(part)
    amount, thing = match.groups() if match else ("", "")
    for unit in ("FLOP/s", "B/s", "B"):
        if amount.lower().endswith(unit.lower()) and thing.lower() in _THINGS[unit]:
            return (thing.lower(), unit), parse_size(amount[: -len(unit)] + "B")
    raise UsageError(f"{part!r} does not describe a part of a machine; write for example {EXAMPLE!r}")

"""Levels of memory with the processor of each, and the roofs between them (MoE-Lightning, section 3.2).

Level 0 is the fastest. Intensities are operations per byte; performance is operations per second.
"""

from dataclasses import dataclass
from math import inf

from scheduler.model.machine import NodeMachine


@dataclass(frozen=True)
class Level:
    """A memory of `memory` bytes, and the processor that reads it; a disk has no processor (`operations` is 0).

    `read` is in bytes per second, `operations` in operations per second.
    """

    name: str
    memory: float
    read: float
    operations: float = 0.0


@dataclass(frozen=True)
class TurningPoints:
    """The intensities at which two roofs cross, in operations per byte that comes from the lower level.

    Attributes:
        move: P1, equation 9. Below it, computing at the lower level is at least as fast as moving the bytes up.
        arrive: P2, equation 10. From it on, the link is not the bottleneck.
        balance: equation 11. At it, the link and the upper level's memory are equally busy.
    """

    move: float
    arrive: float
    balance: float


@dataclass(frozen=True)
class Hierarchy:
    """Levels from the fastest on; `links[i]` is the bytes per second from level i + 1 to level i."""

    levels: tuple[Level, ...]
    links: tuple[float, ...]

    @classmethod
    def of(cls, machine: NodeMachine) -> "Hierarchy":
        """Return the levels of a node: its accelerator if it has one, RAM, and the disk."""
        below = [
            Level("RAM", machine.memory, machine.host.read, machine.host.operations),
            Level("disk", inf, machine.disk.read),
        ]
        links = [machine.disk.read]
        device = machine.accelerator
        if device is None:
            return cls(tuple(below), tuple(links))
        above = Level(device.name, device.memory, device.rates.read, device.rates.operations)
        return cls((above, *below), (device.link.up, *links))

    def between(self, upper: int, lower: int) -> float:
        """Return the bytes per second from a lower level to an upper one: the speed of the slowest link on the way."""
        return min(self.links[upper:lower])

    def local(self, level: int, intensity: float) -> float:
        """Return the attainable operations per second at a level, with bytes of the same level (equation 8).

        `intensity` is in operations per byte.
        """
        at = self.levels[level]
        return min(at.operations, at.read * intensity)

    def across(self, level: int, intensity: float, lower: int, lower_intensity: float) -> float:
        """Return the attainable operations per second at `level`, with bytes that come from the level `lower` (equation
        7).

        The intensities, at `level` and at `lower`, are in operations per byte.
        """
        return min(self.local(level, intensity), self.between(level, lower) * lower_intensity)

    def turning_points(self, level: int, intensity: float, lower: int) -> TurningPoints:
        """Return the intensities at which the roofs for computing at `level` with bytes from `lower` cross.

        `intensity` is the intensity at `level`. Equation 9 contains the intensity at the lower level on both sides, so
        it is solved for that intensity. If the lower memory is faster than the link, the solution is where the roof of
        the lower level's processor ends; else it is 0.
        """
        link, at, below = self.between(level, lower), self.levels[level], self.levels[lower]
        move = below.operations / link if below.read > link else 0.0
        return TurningPoints(move, self.local(level, intensity) / link, at.read * intensity / link)

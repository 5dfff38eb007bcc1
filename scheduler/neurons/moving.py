"""What a node does with its neurons at run time, and what became of it."""

from dataclasses import dataclass

from scheduler.neurons.worth import LAMBDA


@dataclass(frozen=True)
class Moving:
    """What a node does at run time; the defaults are `--sparsity dynamic`. All off: `static`.

    Attributes:
        migrate: neurons move.
        weight: lambda of their importance: 0 for the micro cache alone.
        balance: accelerator and CPU have thresholds of their own.
        ahead: moves under way at once: as many layers as predictions look ahead.
    """

    migrate: bool = True
    weight: float = LAMBDA
    balance: bool = True
    ahead: int = 1


DYNAMIC = Moving()
STATIC = Moving(migrate=False, balance=False)


@dataclass
class ArenaFigures:
    """Sums since the start."""

    active: int = 0  # neurons computed
    active_there: int = 0  # of them, on the accelerator
    moved: int = 0  # neurons
    moves: int = 0
    moved_bytes: int = 0
    seconds_there: float = 0.0  # of computing them on the accelerator, on the CPU
    seconds_here: float = 0.0

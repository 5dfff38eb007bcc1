"""Settings of neuron migration at run time, and its statistics."""

from dataclasses import dataclass

from scheduler.neurons.importance import LAMBDA


@dataclass(frozen=True)
class MigrationSettings:
    """Settings of neuron migration. The defaults are those of `--sparsity dynamic`; `static` has both booleans False.

    Attributes:
        migrate: True if neurons migrate to the accelerator.
        weight: lambda of their importance; with 0, only the predictions for the current token count (the micro cache).
        balance: True if accelerator and CPU get separate thresholds.
        ahead: the most moves in progress at once, which is how many layers ahead neurons are predicted.
    """

    migrate: bool = True
    weight: float = LAMBDA
    balance: bool = True
    ahead: int = 1


DYNAMIC = MigrationSettings()
STATIC = MigrationSettings(migrate=False, balance=False)


@dataclass
class ArenaFigures:
    """Statistics of an arena, summed since the start."""

    active: int = 0  # neurons computed
    active_on_accelerator: int = 0  # neurons computed on the accelerator
    moved: int = 0  # neurons moved
    moves: int = 0
    moved_bytes: int = 0
    accelerator_seconds: float = 0.0  # computing on the accelerator
    cpu_seconds: float = 0.0  # computing on the CPU

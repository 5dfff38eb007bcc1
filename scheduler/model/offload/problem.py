"""What is to be placed, on what machine, for which request, and what the user insists on."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from scheduler.budget import LONGEST_CHUNK
from scheduler.model.machine import NodeMachine
from scheduler.model.offload.memory import Needs, chunk_tokens
from scheduler.model.offload.tasks import Mask
from scheduler.model.offload.work import Cards, KvTier, NodeWork, Pipeline, Place, StepSize, Stretch, Tier, Workload

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Limits:
    """What the user insists on; None: choose."""

    weights: Tier | None = None
    kv: KvTier | None = None
    pipeline: Pipeline | None = None
    prompt: Place | None = None  # where prompts compute what does not stay on the accelerator, all of it
    decode: Place | None = None  # and tokens, but for attention whose keys and values stay there

    def place(self, stretch: Stretch) -> Place | None:
        """That of a stretch."""
        return self.prompt if stretch == "prompt" else self.decode


@dataclass(frozen=True)
class Problem:
    """What is to be placed, and on what."""

    work: NodeWork
    machine: NodeMachine
    request: Workload
    needs: Needs
    limits: Limits = Limits()
    exchange: float = 0.0  # seconds after each block
    cards: Cards = ()  # as its segments are dealt to several accelerators; empty with several: to be chosen
    longest: int = LONGEST_CHUNK  # tokens of a step at most
    reserve: int = 0  # bytes that `machine` leaves out of every accelerator's memory: pages are rounded up

    @cached_property
    def chunk(self) -> int:
        """Tokens of a step of a prompt."""
        return chunk_tokens(self.machine, self.request, self.needs, self.longest)

    @cached_property
    def sizes(self) -> I64:
        """Bytes of each segment, `[segments, 1]`."""
        return np.array([[segment.nbytes] for segment in self.work.segments])

    @cached_property
    def attends(self) -> Mask:
        """Which segments are attention's, `[segments, 1]`."""
        return np.array([[segment.kind == "attention"] for segment in self.work.segments])

    def dealt(self, card: int) -> Mask:
        """Which segments are dealt to an accelerator, `[segments, 1]`."""
        found: Mask = np.array(self.cards or (0,) * len(self.work.segments)).reshape(-1, 1) == card
        return found

    @property
    def rooms(self) -> list[int]:
        """Bytes of each accelerator's memory beside what its kernels have for a step."""
        return [card.memory - self.needs.there.nbytes(self.tokens) for card in self.machine.cards]

    @property
    def tokens(self) -> int:
        """The most tokens of any step."""
        return max(self.chunk, self.request.sequences)

    def step(self, stretch: Stretch) -> tuple[StepSize, int]:
        """The mean step of a stretch, and how many there are."""
        return self._prompt_step() if stretch == "prompt" else self._decode_step()

    def _prompt_step(self) -> tuple[StepSize, int]:
        """Of one long prompt a piece, with half of the others before it; of short ones, as many as fit."""
        request = self.request
        if request.prompt >= self.chunk:
            steps = -(-request.prompt // self.chunk)
            size = request.prompt / steps
            return StepSize(size, 1, size * (steps + 1) / 2), steps * request.sequences
        together = min(self.chunk // request.prompt, request.sequences)
        return StepSize(together * request.prompt, together, request.prompt), -(-request.sequences // together)

    def _decode_step(self) -> tuple[StepSize, int]:
        """One token of each sequence, in the middle of the answers."""
        request = self.request
        context = min(request.prompt + (request.answer + 1) / 2, request.context)
        return StepSize(request.sequences, request.sequences, context), request.answer

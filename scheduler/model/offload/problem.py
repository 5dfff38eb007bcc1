"""The placement problem: a node's work, its machine, the request, and the user's limits."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from scheduler.model.machine import NodeMachine
from scheduler.model.offload.memory import Needs, chunk_tokens
from scheduler.model.offload.tasks import Mask, Tasks
from scheduler.model.offload.work import (
    Cards,
    KvTier,
    NodeWork,
    Pipeline,
    Place,
    RequestPhase,
    StepSize,
    Tier,
    Workload,
    kv_pages,
)
from scheduler.model.sizes import LONGEST_CHUNK

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Limits:
    """Choices that the user fixed; None: not fixed."""

    weights: Tier | None = None
    kv: KvTier | None = None
    pipeline: Pipeline | None = None
    prompt: Place | None = None  # where prompt steps compute all segments that are not resident on the accelerator
    decode: Place | None = None  # the same of decode steps, except attention if its keys and values are there

    def place(self, phase: RequestPhase) -> Place | None:
        """Return the device that the user chose for a phase, or None if the planner chooses it."""
        return self.prompt if phase == "prompt" else self.decode


@dataclass(frozen=True)
class Problem:
    """The work to place, and the machine to place it on."""

    work: NodeWork
    machine: NodeMachine
    request: Workload
    needs: Needs
    limits: Limits = Limits()
    exchange: float = 0.0  # seconds after each block
    cards: Cards = ()  # the accelerator of each segment; empty with several accelerators: to be chosen
    longest: int = LONGEST_CHUNK  # the most tokens of a step
    reserve: int = 0  # bytes of every accelerator's memory that `machine` does not include: pages are rounded up
    chains: bool = False  # whether one accelerator may compute all segments as a chain: no sums of nodes are between

    @cached_property
    def chunk(self) -> int:
        """Tokens of a prompt step."""
        return chunk_tokens(self.machine, self.request, self.needs, self.longest)

    @cached_property
    def sizes(self) -> I64:
        """Number of bytes of each segment, `[segments, 1]`."""
        return np.array([[segment.nbytes] for segment in self.work.segments])

    @cached_property
    def attends(self) -> Mask:
        """Mask of the segments that are attention segments, `[segments, 1]`."""
        return np.array([[segment.kind == "attention"] for segment in self.work.segments])

    @property
    def in_chains(self) -> bool:
        """True if the node's only accelerator computes a step as a chain if it has all weights, keys and values."""
        return self.chains and [card.follow is None for card in self.machine.cards] == [False]

    @cached_property
    def head_there(self) -> bool:
        """True if the accelerator has room for the head, which it computes if it has all weights, keys and values."""
        if not self.in_chains or not self.work.head.nbytes:
            return False
        (card,) = self.machine.cards
        taken = int(self.sizes.sum()) + kv_pages(self.work, self.request) + self.needs.card_need.nbytes(self.tokens)
        return not card.shared and taken + self.work.head.nbytes <= card.memory

    def tasks(self, step: StepSize, cards: Cards = ()) -> Tasks:
        """Return the tasks of a step, for segments dealt to the accelerators `cards`."""
        dealt = cards or self.cards
        return Tasks.of(self.work, self.machine, step, self.exchange, dealt, self.in_chains, self.head_there)

    def dealt(self, card: int) -> Mask:
        """Return which segments belong to the accelerator `card`, `[segments, 1]`."""
        found: Mask = np.array(self.cards or (0,) * len(self.work.segments)).reshape(-1, 1) == card
        return found

    @property
    def free_bytes(self) -> list[int]:
        """Bytes of each accelerator's memory that are left for weights, keys and values after its kernels' needs."""
        return [card.memory - self.needs.card_need.nbytes(self.tokens) for card in self.machine.cards]

    @property
    def tokens(self) -> int:
        """The most tokens of any step."""
        return max(self.chunk, self.request.sequences)

    def step(self, phase: RequestPhase) -> tuple[StepSize, int]:
        """Return the mean step of a phase, and the number of its steps."""
        return self._prompt_step() if phase == "prompt" else self._decode_step()

    def _prompt_step(self) -> tuple[StepSize, int]:
        """Return the mean prompt step, and the number of prompt steps.

        A long prompt is computed in pieces. On average, half of the other pieces come before a piece. Of short prompts,
        as many as fit are computed together.
        """
        request = self.request
        if request.prompt >= self.chunk:
            steps = -(-request.prompt // self.chunk)
            size = request.prompt / steps
            return StepSize(size, 1, size * (steps + 1) / 2), steps * request.sequences
        together = min(self.chunk // request.prompt, request.sequences)
        return StepSize(together * request.prompt, together, request.prompt), -(-request.sequences // together)

    def _decode_step(self) -> tuple[StepSize, int]:
        """Return the mean decode step, and the number of decode steps.

        A step computes one token of each sequence. Its context is as long as in the middle of the answers.
        """
        request = self.request
        context = min(request.prompt + (request.answer + 1) / 2, request.context)
        return StepSize(request.sequences, request.sequences, context), request.answer

"""A deployment: one epoch of a plan with its nodes, their limits and their pages; made, replaced and closed whole.

Hidden states enter its first stage and come back from its last. `master.deployment.deploy` makes one; the requests of
`master.generation.engine` outlive it.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np
import numpy.typing as npt

from master.generation.pages import PagePool
from master.vocabulary.vocabulary import Vocabulary
from tpi.net.messages import Step, StepEntry
from tpi.partition import Range, Shard
from worker.node.node import Node

F32 = npt.NDArray[np.float32]

TUNING = 0  # the number of the step in which the group measures its links and chooses


class Workers(Protocol):
    """The other nodes as a deployment needs them; `master.workers.cluster` has the real ones."""

    def step(self, step: Step) -> None:
        """Start a step on every worker."""


class Nobody:
    """No other nodes."""

    def step(self, step: Step) -> None:
        """Nobody to tell."""


@dataclass(frozen=True)
class Stage:
    """A run of layers that the same nodes hold, each its share of every one. All layers are one stage, for now."""

    layers: Range
    ranks: tuple[int, ...]
    shards: tuple[Shard, ...]  # of each of `ranks`


@dataclass(frozen=True)
class Capacity:
    """What the nodes of a deployment can hold: the least that any of them says. Tokens but for `pages`."""

    context: int
    chunk: int  # of one step
    pages: int


@dataclass(frozen=True)
class AtOnce:
    """Requests that there is room for at once.

    Attributes:
        aimed: how many there were to be: all, or the fastest; wanted: how many the user would have had.
        batches: whether accelerators compute them in micro-batches.
    """

    requests: int = 1
    aimed: int = 1
    wanted: int = 1
    batches: bool = False

    def words(self) -> str:
        """How many run at once, and why not all that are wanted."""
        said = f"{self.requests} requests at once" + (" (N)" if self.batches else "")
        return f"{said} of {self.wanted}: {self._why()}" if self.requests < self.wanted else said

    def _why(self) -> str:
        if self.requests < self.aimed:
            return f"memory has no room for {self.aimed}"
        if self.batches:
            return "by the roofline model the fastest of all that memory has room for"
        return "no accelerator batches them; --parallel asks for more"


class Deployment:
    """The nodes that run a plan, this process's own included, with the embedding and the head that only it has."""

    def __init__(
        self,
        fence: tuple[int, int],
        stages: Sequence[Stage],
        node: Node,
        workers: Workers,
        vocabulary: Vocabulary,
        limits: Capacity,
        resources: ExitStack | None = None,
        at_once: AtOnce | None = None,
    ) -> None:
        """`fence` is the session (random, of this run of the master) and the epoch (of this deployment).

        `resources` are closed with the deployment; `at_once` are the requests that it has pages for.
        """
        self.session, self.epoch = fence
        self.stages = tuple(stages)
        self.node = node
        self.vocabulary = vocabulary
        self.limits = limits
        self.at_once = at_once or AtOnce()
        self.pages = PagePool(limits.pages)
        self._workers = workers
        self._resources = resources or ExitStack()
        self._steps = count(TUNING + 1)

    def forward(self, entries: tuple[StepEntry, ...], released: tuple[int, ...], x: F32) -> F32:
        """Hidden states `[tokens, hidden]` after the last block, from those before the first.

        Args:
            entries: which tokens of which sequences these are.
            released: sequences that ended since the last step.

        Raises:
            NodeLost, NodeError: if a worker is lost or fails.
        """
        step = Step(self.session, self.epoch, next(self._steps), entries, released, x)
        self._workers.step(step)
        hidden = self.node.run(step)
        assert hidden is not None  # rank 0 always gets the last sum
        return hidden

    def close(self) -> None:
        """Stop what runs on this machine and give its memory back; workers stay with their master. Idempotent."""
        self._resources.close()


def choose_collective(fence: tuple[int, int], node: Node, workers: Workers, hidden: int) -> None:
    """The first step, without tokens: all nodes measure their links and choose how they sum.

    Raises:
        NodeLost, NodeError: if a worker is lost or fails.
    """
    step = Step(*fence, TUNING, (), (), np.empty((0, hidden), np.float32))
    workers.step(step)
    node.run(step)

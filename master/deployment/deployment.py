"""A deployment: one epoch of a plan with its nodes, their limits and their pages. It is replaced as a whole.

Hidden states enter its first stage and leave its last. `master.deployment.deploy` makes deployments; the requests of
`master.generation.engine` outlive them.
"""

from collections import deque
from collections.abc import Container, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np
import numpy.typing as npt

from allreduce.hops import MASTER_RANK
from allreduce.stages import most_in_flight
from master.deployment.mtp import MtpLayer
from master.deployment.pages import PagePool
from master.deployment.stages import Stage
from master.deployment.states import StatePool
from master.vocabulary.vocabulary import Vocabulary
from tpi.kernels.kv import states_for
from tpi.net.messages import Step, StepEntry
from worker.node.node import Node

F32 = npt.NDArray[np.float32]

TUNING = 0  # number of the step in which the nodes measure their links and choose a collective


class Workers(Protocol):
    """The interface of the other nodes for a deployment; implemented by `master.workers.cluster`."""

    def step(self, step: Step, first: Container[int] | None = None) -> None:
        """Start a step on every worker. Only the ranks in `first` (None: all) get its hidden states."""


@dataclass(frozen=True)
class Capacity:
    """The capacity of a deployment: the minimum of all nodes' reports, in tokens. `pages` is a number of pages."""

    context: int
    chunk: int  # tokens of one step
    pages: int


@dataclass(frozen=True)
class Concurrency:
    """Numbers of requests that run at once.

    Attributes:
        requests: the number that fits into memory.
        aimed: the number that the plan aimed at: the user's, or the number with the highest throughput.
        wanted: the number that the user asked for.
        batches: True if accelerators compute the requests in micro-batches.
    """

    requests: int = 1
    aimed: int = 1
    wanted: int = 1
    batches: bool = False

    def words(self) -> str:
        """Return a phrase with the number of requests at once, and the reason if fewer than wanted."""
        said = f"{self.requests} requests at once" + (" (N)" if self.batches else "")
        return f"{said} of {self.wanted}: {self._why()}" if self.requests < self.wanted else said

    def _why(self) -> str:
        if self.requests < self.aimed:
            return f"memory has no room for {self.aimed}"
        if self.batches:
            return "by the roofline model the fastest number that fits into memory"
        return "no accelerator batches them; --parallel asks for more"


class Deployment:
    """The nodes that run a plan, including the master's own, and the embedding and head, which only the master has."""

    def __init__(
        self,
        fence: tuple[int, int],
        stages: Sequence[Stage],
        node: Node,
        workers: Workers,
        vocabulary: Vocabulary,
        limits: Capacity,
        resources: ExitStack | None = None,
        at_once: Concurrency | None = None,
        drafts: bool = True,
        mtp: MtpLayer | None = None,
    ) -> None:
        """Create a deployment of nodes that have loaded their weights.

        `fence` is the session (random, one per run of the master) and the epoch (the number of this deployment).
        `resources` are closed with the deployment. `at_once` is the number of requests for which it has pages.
        `drafts` allows drafted tokens in steps: a token's result must not depend on the other rows of the step.
        `mtp` is the layer for multi-token prediction, if there is one in memory.
        """
        self.session, self.epoch = fence
        self.stages = tuple(stages)
        self.node = node
        self.vocabulary = vocabulary
        self.limits = limits
        self.at_once = at_once or Concurrency()
        recurrent = any(vocabulary.config.recurrent)
        self.pages = PagePool(limits.pages, StatePool(states_for(limits.pages)) if recurrent else None)
        self.drafts = drafts
        self.mtp = mtp
        self._workers = workers
        self._resources = resources or ExitStack()
        self._steps = count(TUNING + 1)
        self._leads = all(MASTER_RANK not in stage.ranks for stage in self.stages[1:])
        self._in_flight = deque[tuple[Step, F32 | None]]()

    @property
    def most_in_flight(self) -> int:
        """The most steps that may be in flight at once: one in each stage, if no node is in several stages."""
        return most_in_flight([stage.ranks for stage in self.stages])

    @property
    def in_flight(self) -> int:
        """The number of steps in flight. May be read by any thread."""
        return len(self._in_flight)

    def start(
        self, entries: tuple[StepEntry, ...], released: tuple[int, ...], x: F32, per_layer: F32 | None = None
    ) -> None:
        """Start a step on every node; `finish` returns its result. At most `most_in_flight` may be in flight.

        Args:
            entries: the sequences and positions of the rows.
            released: ids of sequences that ended since the last step.
            x: the hidden states `[tokens, hidden]` before the first block.
            per_layer: the embeddings of the tokens for all layers, `[tokens, values]`; None if the model has none.

        Raises:
            NodeLost, NodeError: if a worker is lost or fails.
        """
        step = Step(self.session, self.epoch, next(self._steps), entries, released, x, _given(per_layer, x))
        self._workers.step(step, self.stages[0].ranks)
        # in a later stage this node would wait here for the stage before, which may have several steps to compute
        own = self.node.compute(step) if self._leads else None
        self._in_flight.append((step, own))

    def finish(self) -> F32:
        """Return the hidden states `[tokens, hidden]` after the last block of the step that was started first.

        Raises:
            NodeLost, NodeError: if a worker is lost or fails.
        """
        step, own = self._in_flight.popleft()
        hidden = self.node.result(step, own if self._leads else self.node.compute(step))
        assert hidden is not None  # rank 0 always gets the result of the last stage
        return hidden

    def close(self) -> None:
        """Stop the node of this process and free its memory. Workers stay connected. Further calls do nothing."""
        self._resources.close()


def _given(per_layer: F32 | None, x: F32) -> F32:
    return np.empty((len(x), 0), np.float32) if per_layer is None else per_layer


def choose_collective(fence: tuple[int, int], node: Node, workers: Workers, hidden: int) -> None:
    """Run the first step, without tokens: all nodes measure their links and choose how to sum partial results.

    Raises:
        NodeLost, NodeError: if a worker is lost or fails.
    """
    step = Step(*fence, TUNING, (), (), np.empty((0, hidden), np.float32))
    workers.step(step)
    node.run(step)

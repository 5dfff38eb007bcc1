"""Steps on a deployment: token ids in, hidden states out. The engine and a draft model use it."""

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from master.deployment.deployment import Deployment
from master.generation.batcher import EVEN, Batcher, Work
from tpi.finite import require_finite
from tpi.net.messages import StepEntry

F32 = npt.NDArray[np.float32]


class Steps:
    """Access to a deployment that starts steps and returns their results in the same order."""

    def __init__(self, deployment: Deployment, chunk: int) -> None:
        """Create the steps of `deployment`, each of at most `chunk` tokens."""
        self.deployment = deployment
        self.batcher = Batcher(deployment.pages, chunk, EVEN * deployment.vocabulary.config.hidden)

    def start(self, work: SequenceOf[Work], released: list[int]) -> None:
        """Start a step with the tokens of `work`.

        The nodes forget the page tables of the sequences whose ids are in `released`, which is emptied.

        Raises:
            NodeLost, NodeError: if a worker is lost or fails.
        """
        tokens = [token for item in work for token in item.tokens]
        positions = [position for item in work for position in range(item.position, item.position + item.count)]
        gone = tuple(released)
        released.clear()
        x = self.deployment.vocabulary.embedding(tokens, positions)
        require_finite(x, "a row of the embedding", "the model is damaged; make the pack again from its source")
        made = self.deployment.vocabulary.per_layer
        self.deployment.start(tuple(map(entry_of, work)), gone, x, None if made is None else made(tokens, x))
        self.batcher.start(work)

    def result(self, work: SequenceOf[Work]) -> F32:
        """Return hidden states `[tokens, hidden]` after the last block for `work`, the oldest step in flight.

        Raises:
            NodeLost, NodeError: if a worker is lost or fails. The sequences then stay as they were before the step.
        """
        hidden = self.deployment.finish()
        require_finite(hidden, "the sum after the last block")
        self.batcher.commit(work)
        return hidden


def entry_of(work: Work) -> StepEntry:
    """Return `work` as an entry of the `Step` message, in which the slots of states are numbered from 1."""
    read, write = (0 if slot is None else slot + 1 for slot in (work.read, work.write))
    return StepEntry(work.sequence.id, work.position, work.count, work.kept, work.appended, read, write)

"""A draft model: a small model on the master that continues each sequence greedily, as a draft for the large one.

Leviathan et al. (2023), Fast Inference from Transformers via Speculative Decoding.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt

from master.deployment.deployment import Deployment
from master.deployment.pages import PagePool
from master.generation.sequence import Sequence
from master.generation.speculation.lookup import ids, same_tokens
from master.generation.speculation.pace import ROWS
from master.generation.steps import Steps
from tpi.kernels.kv import pages_for

_CHUNK = 128  # limit of prompt tokens that are computed between two steps of the large model
_NEAR = 2 * ROWS  # a sequence gets a draft if at most this many of its tokens are still to be computed


class DraftModel:
    """A model whose sequences follow those of the large model. It belongs to the engine's thread.

    Its keys and values are dropped from the first wrong token on. If its pages run out, it forgets the sequence that it
    followed longest ago.
    """

    source: Final = "model"

    def __init__(self, deployment: Deployment, vocab: int) -> None:
        """Create a draft model that runs on `deployment`, for a large model of `vocab` tokens."""
        self._deployment = deployment
        self._steps = Steps(deployment, min(_CHUNK, deployment.limits.chunk))
        self._vocab = min(vocab, deployment.vocabulary.config.vocab)
        # by the id of the large model's sequence, the latest last
        self._own: OrderedDict[int, Sequence] = OrderedDict()
        self._released: list[int] = []  # ids of sequences whose page tables the node is to forget

    def follow(self, targets: SequenceOf[Sequence]) -> list[Sequence]:
        """Compute the tokens of `targets` in the model's own sequences; return the sequences that can be continued.

        At most one step is computed, so that a long prompt does not delay other requests. A sequence that then still
        lacks many tokens, or for which there are no pages, is left out.
        """
        followed = [own for target in targets if (own := self._followed(target, targets))]
        if behind := next((own for own in followed if own.pending > _NEAR), None):
            last = behind.tokens.pop()  # the last token is run when the sequence is continued
            self._step([behind])
            behind.tokens.append(last)
        return [own for own in followed if own.pending <= _NEAR]

    def continued(self, sequences: SequenceOf[Sequence]) -> list[float]:
        """Append the most likely token to each of the model's own `sequences`; return its probability in each."""
        found = dict[int, float]()
        while waiting := [each for each in sequences if each.id not in found]:
            for sequence, row in self._step(waiting):
                token, found[sequence.id] = most_likely(row[: self._vocab])
                sequence.tokens.append(token)
        return [found[each.id] for each in sequences]

    def since(self, id_: int, known: int) -> list[int]:
        """Return the tokens drafted for the large model's sequence `id_`: those after the first `known` tokens."""
        return list(self._own[id_].tokens[known:])

    def release(self, id_: int) -> None:
        """Forget the sequence that follows the large model's sequence `id_`; its pages can still be found."""
        if (own := self._own.pop(id_, None)) is not None:
            if own.announced:
                self._released.append(id_)
            own.release_pages(self._deployment.pages)

    def _followed(self, target: Sequence, targets: Iterable[Sequence]) -> Sequence | None:
        """Return this model's sequence for `target`, brought up to the tokens of `target`, with pages for a draft.

        Return None if this model lacks one of the tokens, or if the context or the pages are too short. Pages of
        sequences that follow `targets` are not taken.
        """
        own = self._own.setdefault(target.id, Sequence(target.id, array("i"), reuse=True, client=target.client))
        self._own.move_to_end(target.id)
        known = same_tokens(ids(own.tokens), ids(target.tokens)[:-1])  # the last token is always computed
        if max(target.tokens[known:], default=0) >= self._vocab:
            return None  # a token that this model does not have
        own.truncate(self._deployment.pages, known)
        own.tokens.extend(target.tokens[known:])
        own.begin(self._deployment.pages)
        if len(own.tokens) + ROWS > self._deployment.limits.context:
            return None
        needed = {each.id for each in targets}
        unused = [id_ for id_ in self._own if id_ not in needed]
        return own if has_room(self._deployment.pages, own, unused, self.release) else None

    def _step(self, sequences: SequenceOf[Sequence]) -> list[tuple[Sequence, npt.NDArray[np.float32]]]:
        """Run one step; return the sequences whose tokens are all computed, with the logits `[vocab]` after each."""
        work = self._steps.batcher.pick(sequences)
        self._steps.start(work, self._released)
        rows, ends = self._steps.result(work), list(accumulate(item.count for item in work))
        done = [(item, end - 1) for item, end in zip(work, ends, strict=True) if item.completes]
        if not done:
            return []
        logits = self._deployment.vocabulary.head(rows[[row for _, row in done]])
        return [(item.sequence, row) for (item, _), row in zip(done, logits, strict=True)]


def has_room(pages: PagePool, own: Sequence, unused: list[int], forget: Callable[[int], None]) -> bool:
    """Allocate pages for a draft of up to `ROWS` tokens after `own`; return False if there are too few.

    For more pages, call `forget` with the ids in `unused`, from the first on.
    """
    end = len(own.tokens) + ROWS
    while (missing := pages_for(end) - len(own.table)) > pages.free and unused:
        forget(unused.pop(0))
    if missing > pages.free:
        return False
    pages.append(own.table, end)
    return True


def most_likely(logits: npt.NDArray[np.float32]) -> tuple[int, float]:
    """Return the token with the highest of `logits` `[vocab]`, and its probability."""
    best = int(logits.argmax())
    return best, float(1 / np.exp(logits - logits[best], dtype=np.float64).sum())

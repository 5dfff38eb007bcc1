"""Drafts by the layer for multi-token prediction: it goes on from hidden states that the model computes anyway.

The layer has a row for each position p of a sequence, with the token at p + 1. Its hidden states after the last row
predict the token that follows. Where the model's hidden states are not known yet, the layer's own take their place.
To follow a sequence costs time even while nothing is drafted, so the layer stops when its drafts do not pay (`rest`).
When it begins again, it has the latest rows alone, without those before them.
"""

from array import array
from collections import OrderedDict
from collections.abc import Container, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from secrets import token_bytes
from typing import Final

import numpy as np
import numpy.typing as npt

from master.deployment.mtp import MtpLayer
from master.generation.batcher import Batcher, Work
from master.generation.sequence import Sequence
from master.generation.speculation.draftmodel import has_room, most_likely
from master.generation.speculation.lookup import ids, same_tokens
from master.generation.speculation.pace import ROWS
from master.generation.steps import entry_of
from tpi.kernels.spec import PAGE_TOKENS

F32 = npt.NDArray[np.float32]

_CHUNK = 128  # limit of rows in one step of the layer
_WAITING = 32  # rows that may wait until a draft needs them
_GAP = PAGE_TOKENS  # limit of rows without hidden states, whose tokens the model found in its cache
_SALT = 16  # bytes of a random salt, with which no cached rows are found


@dataclass
class _Followed:
    """The layer's sequence that follows a sequence of the model.

    Its tokens are those of the model's sequence after the position `begin`; tokens beyond its `rows` are drafts.
    `hidden` has the model's normed hidden states `[rows, hidden]` of the rows that are still to be computed.
    """

    sequence: Sequence
    hidden: F32
    life: int  # `life` of the model's sequence when the tokens were compared
    begin: int = 0  # position of the first row
    lost: bool = False  # True if there were too few pages, so that no draft is possible
    end: F32 = field(default_factory=lambda: np.empty(0, np.float32))  # the layer's hidden states after the last row

    @property
    def rows(self) -> int:
        """Number of rows that are computed, or whose hidden states are known."""
        return self.sequence.computed + len(self.hidden)

    @property
    def after(self) -> int:
        """The position of the first row whose hidden states are not known."""
        return self.begin + self.rows


class MtpDrafts:
    """The drafts of the layer for multi-token prediction. The object belongs to the engine's thread."""

    source: Final = "mtp"

    def __init__(self, layer: MtpLayer) -> None:
        self._layer = layer
        self._batcher = Batcher(layer.pages, min(_CHUNK, layer.chunk))
        self._own: OrderedDict[int, _Followed] = OrderedDict()  # by the id of the model's sequence, the latest last
        self._released: list[int] = []  # ids of sequences whose page tables the node is to forget

    def see(self, work: SequenceOf[Work], rows: F32, drawing: Container[int]) -> None:
        """Record the model's last hidden states `rows` `[tokens, hidden]` of a step that did `work`.

        Only sequences whose ids are in `drawing` are followed. Call this when the sequences have their next tokens.
        Rows wait until there are many, or a draft needs them.
        """
        needed, first = {item.sequence.id for item in work}, 0
        for item in work:
            if item.counts and item.sequence.id in drawing:
                self._take(item, rows[first : first + item.count])
            first += item.count
        many = [own for id_ in needed if (own := self._own.get(id_)) and len(own.hidden) > _WAITING]
        self._catch_up(many, needed)

    def follow(self, targets: SequenceOf[Sequence]) -> list[Sequence]:
        """Compute the rows that wait for `targets`; return the layer's sequences that can be continued.

        The last tokens of a target may be drafts in flight, for which the layer uses its own hidden states.
        """
        found = {target.id: own for target in targets if (own := self._own.get(target.id)) and not own.lost}
        for own in found.values():
            own.sequence.truncate(self._layer.pages, own.rows)  # the last drafts
        self._catch_up(found.values(), {target.id for target in targets})
        for target in targets:
            own = found.get(target.id)
            if own is None or own.lost or not own.end.size or len(target.tokens) - 1 - own.after > ROWS:
                found.pop(target.id, None)
                continue
            for token in target.tokens[own.after + 1 :]:
                self._run_drafted([own.sequence])
                own.sequence.tokens.append(token)
        return [own.sequence for own in found.values()]

    def continued(self, sequences: SequenceOf[Sequence]) -> list[float]:
        """Append the most likely token to each of the layer's own `sequences`; return its probability in each."""
        self._run_drafted(sequences)
        found = []
        for each, row in zip(sequences, self._layer.head(self._ends(sequences)), strict=True):
            token, probability = most_likely(row)
            each.tokens.append(token)
            found.append(probability)
        return found

    def since(self, id_: int, known: int) -> list[int]:
        """Return the tokens drafted for the model's sequence `id_`: those after the first `known` tokens."""
        return list(self._own[id_].sequence.tokens[known:])

    def rest(self) -> None:
        """Stop following all sequences. A sequence that `see` gets later is followed from its position then."""
        for id_ in list(self._own):
            self._drop(id_)

    def release(self, id_: int) -> None:
        """Forget this layer's copy of the model's sequence `id_`. Its pages can be reused for the same tokens."""
        if (own := self._own.get(id_)) is None:
            return
        own.sequence.truncate(self._layer.pages, own.rows)
        self._catch_up([own], {id_})
        self._drop(id_)

    def _run_drafted(self, sequences: SequenceOf[Sequence]) -> None:
        """Compute the row of each drafted token that is still to be run, with the layer's own hidden states."""
        if drafted := [each for each in sequences if each.pending]:
            self._step(self._batcher.pick(drafted), self._layer.head.norm(self._ends(drafted)))

    def _ends(self, sequences: SequenceOf[Sequence]) -> F32:
        return np.stack([self._own[each.id].end for each in sequences])

    def _take(self, item: Work, rows: F32) -> None:
        """Store the hidden states of `item`, which are among `rows`, until the layer computes their rows.

        A hidden state is stored only if the token after it is known.
        """
        target, pages = item.sequence, self._layer.pages
        own = self._followed(target, item.position)
        if own.lost:
            return
        if own.life != target.life:
            own.life = target.life
            self._keep(own, same_tokens(ids(own.sequence.tokens), ids(target.tokens)[own.begin + 1 :]))
        own.sequence.truncate(pages, own.rows)
        if item.position - own.after > _GAP:
            own = self._begin(target, item.position - 1)  # the layer leaves out the token of its first row
        begin, end = own.after, min(target.computed, len(target.tokens) - 1)
        gap = max(0, item.position - begin)
        if end <= begin:
            return
        known = self._layer.normed(rows[begin + gap - item.position : end - item.position])
        own.hidden = np.concatenate((own.hidden, np.zeros((gap, known.shape[1]), np.float32), known))
        own.sequence.tokens.extend(target.tokens[begin + 1 : end + 1])

    def _keep(self, own: _Followed, rows: int) -> None:
        """Reduce `own` to its first `rows` rows: drop all later tokens, cached keys and values, and waiting hidden
        states.
        """
        own.hidden = own.hidden[: max(0, rows - own.sequence.computed)]
        own.sequence.truncate(self._layer.pages, rows)

    def _followed(self, target: Sequence, position: int) -> _Followed:
        """Return the layer's sequence for `target`; a new one begins with cached pages, at most up to `position`."""
        if (own := self._own.get(target.id)) is None:
            tokens = array("i", target.tokens[1 : position + 2])
            sequence = Sequence(target.id, tokens, reuse=True, client=target.client)
            sequence.begin(self._layer.pages)
            sequence.truncate(self._layer.pages, sequence.computed)
            own = self._own[target.id] = _Followed(
                sequence, np.empty((0, self._layer.config.hidden), np.float32), target.life
            )
        self._own.move_to_end(target.id)
        return own

    def _begin(self, target: Sequence, position: int) -> _Followed:
        """Follow `target` anew, from the row at `position` on; no other sequence can reuse these rows."""
        if (before := self._own.pop(target.id, None)) is not None:
            before.sequence.release_pages(self._layer.pages)
        sequence = Sequence(target.id, array("i"), client=replace(target.client, salt=token_bytes(_SALT)))
        hidden = np.empty((0, self._layer.config.hidden), np.float32)
        own = self._own[target.id] = _Followed(sequence, hidden, target.life, position)
        return own

    def _catch_up(self, followed: Iterable[_Followed], needed: set[int]) -> None:
        """Compute the rows that wait in `followed`.

        If pages run out, give up sequences whose ids are not in `needed`.
        """
        ready = [own for own in followed if len(own.hidden) and self._has_room(own, needed)]
        while waiting := [own.sequence for own in ready if own.sequence.pending]:
            work = self._batcher.pick(waiting)
            hidden = [self._own[item.sequence.id].hidden[: item.count] for item in work]
            self._step(work, np.concatenate(hidden))
            self._batcher.commit(work)
            for item in work:
                own = self._own[item.sequence.id]
                own.hidden = own.hidden[item.count :]

    def _has_room(self, own: _Followed, needed: set[int]) -> bool:
        """Allocate pages for the rows of `own` and a draft; if there are too few, give `own` up and return False.

        For more pages, drop the layer's other sequences, except those with ids in `needed`.
        """
        unused = [id_ for id_ in self._own if id_ not in needed]
        if has_room(self._layer.pages, own.sequence, unused, self._drop):
            return True
        own.sequence.release_pages(self._layer.pages)
        own.lost, own.hidden = True, own.hidden[:0]
        return False

    def _drop(self, id_: int) -> None:
        sequence = self._own.pop(id_).sequence
        if sequence.announced:
            self._released.append(id_)
        sequence.release_pages(self._layer.pages)

    def _step(self, work: SequenceOf[Work], hidden: F32) -> None:
        """Run the layer on all rows of `work`, whose `hidden` states are `[rows, hidden]`."""
        tokens = [token for item in work for token in item.tokens]
        gone = tuple(self._released)
        self._released.clear()
        out, end = self._layer.run([entry_of(item) for item in work], gone, tokens, hidden), 0
        self._batcher.start(work)
        for item in work:
            end += item.count
            self._own[item.sequence.id].end = out[end - 1]

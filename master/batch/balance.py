"""Request batching: requests of any lengths in micro-batches of about as many tokens each, none of them padded.

MoE-Lightning (Cao et al., ASPLOS 2025), algorithm 2. Numbers only.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    """Tokens of a request: of its prompt, and of its answer at most."""

    prompt: int
    answer: int

    @property
    def total(self) -> int:
        """What it takes of the memory for keys and values at its end."""
        return self.prompt + self.answer


def micro_batches(requests: Sequence[Lengths], most: int, room: int) -> tuple[list[list[int]], list[int]]:
    """Requests by their numbers in micro-batches, those that begin first coming first, and those that found no room.

    The longest prompt goes first, each to the micro-batch with the fewest prompt tokens so far, which is closed when it
    has `most` requests; one whose keys and values, prompts and answers together, would pass `room` tokens waits for
    the next batch. As in the paper, but that answers may differ in length, and that what is not full is kept.
    """
    count = -(-len(requests) // most)
    open_: list[list[int]] = [[] for _ in range(count)]
    closed: list[list[int]] = []
    aborted: list[int] = []
    for number in sorted(range(len(requests)), key=lambda at: (-requests[at].prompt, at)):
        part = min(open_, key=lambda part: sum(requests[at].prompt for at in part), default=None)
        if part is None or sum(requests[at].total for at in [*part, number]) > room:
            aborted.append(number)
            continue
        part.append(number)
        if len(part) == most:
            closed.append(part)
            open_.remove(part)
    return [*closed, *(part for part in open_ if part)], aborted


def in_order(requests: Sequence[Lengths], most: int, room: int) -> list[int]:
    """All requests in the order in which they should begin: micro-batch by micro-batch, batch by batch.

    One that has no room at all comes alone: whoever runs it says why it cannot be answered.
    """
    left, order = list(range(len(requests))), list[int]()
    while left:
        placed, aborted = micro_batches([requests[at] for at in left], most, room)
        order += [left[at] for part in placed for at in part] or [left[aborted.pop(0)]]
        left = [left[at] for at in aborted]
    return order

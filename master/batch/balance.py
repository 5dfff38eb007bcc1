"""Request batching: micro-batches of about equal numbers of prompt tokens, without padding.

MoE-Lightning (Cao et al., ASPLOS 2025), algorithm 2. The functions compute with lengths only, without the text of
requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    """The number of prompt tokens of a request, and the maximum number of its answer's tokens."""

    prompt: int
    answer: int

    @property
    def total(self) -> int:
        """Tokens of KV cache that the request needs at its end."""
        return self.prompt + self.answer


def micro_batches(requests: Sequence[Lengths], most: int, room: int) -> tuple[list[list[int]], list[int]]:
    """Return micro-batches of requests, in the order of their start, and the requests that do not fit.

    Requests are given by their indices. The longest prompt goes first, into the micro-batch with the fewest prompt
    tokens. A micro-batch is closed when it has `most` requests. A request with which a micro-batch would exceed `room`
    tokens (prompts plus answers) waits for the next batch.

    Unlike in the paper, answers may differ in length, and micro-batches that are not full are used.
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
    """Return the indices of all requests in the order in which they should begin.

    Requests are sorted by batch and micro-batch. A request that does not fit even alone is included: the engine refuses
    it with a reason.
    """
    left, order = list(range(len(requests))), list[int]()
    while left:
        placed, aborted = micro_batches([requests[at] for at in left], most, room)
        order += [left[at] for part in placed for at in part] or [left[aborted.pop(0)]]
        left = [left[at] for at in aborted]
    return order

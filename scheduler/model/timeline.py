"""The exact timeline of one node: one queue that computes and exchanges, and one that loads into the ring.

    use(b)  starts when the exchange before it is over and block b is in memory, and takes compute[b]
    exchange after b takes exchange[b] (the last one of a token includes what happens between tokens)
    load(n) starts when load(n - 1) is over and use n - lag(n) is released, and takes load[b] (n counts streamed uses)

A use that waited for its load starts `wake` later, because the waiting thread must be woken. A load that finds the disk
idle takes `start` longer. Costs may differ from token to token: if a load is about as long as the work that hides it,
the slow tokens decide, and medians would hide them.

The closed forms of `scheduler.model.steady` are checked against this timeline, and `scheduler.model.placement` compares
placements with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scheduler.model.ring import Ring


@dataclass(frozen=True)
class Costs:
    """Seconds per block, in the order of use: to compute it, to exchange its result, and to load it."""

    compute: Sequence[float]
    exchange: Sequence[float]
    load: Sequence[float]
    wake: float = 0.0  # additional seconds of every use that waits
    start: float = 0.0  # additional seconds of every load that does not follow another at once

    @property
    def busy(self) -> float:
        """Seconds that a token takes when it never waits for weights."""
        return sum(self.compute) + sum(self.exchange)


@dataclass(frozen=True)
class OtherWaits:
    """Seconds per token that this node waits for a disk for other reasons than its own blocks.

    The measured seconds of exchanges contain these waits.

    Attributes:
        head: the wait for the master's streamed head, between two tokens.
        rows: the wait for rows of the master's embedding, between two tokens; 0 if the embedding is in memory.
        tail: the wait for another node's disk, between two tokens.
        others: the wait for other nodes' disks, during this node's allreduces.
    """

    head: float = 0.0
    rows: float = 0.0
    tail: float = 0.0
    others: float = 0.0

    @property
    def own(self) -> float:
        """Seconds per token that this node waits for its own disk, for the head and the embedding's rows."""
        return self.head + self.rows

    def subtracted_from(self, costs: Costs) -> Costs:
        """Return `costs` with exchanges that do not contain these waits."""
        exchange = list(costs.exchange)
        if not exchange:
            return costs
        exchange[-1] = max(0.0, exchange[-1] - self.own - self.tail)
        between = max(0.0, exchange[-1] - _mean(exchange[:-1]))  # between tokens no sum waits for other nodes
        exchange[-1] -= between
        total = sum(exchange)
        left = max(0.0, 1 - self.others / total) if total else 1.0
        exchange = [left * seconds for seconds in exchange]
        exchange[-1] += max(0.0, between - max(0.0, self.others - total))
        return replace(costs, exchange=exchange)


NO_OTHER_WAITS = OtherWaits()


@dataclass(frozen=True)
class Timeline:
    """The seconds of each simulated token, and the part of them that was spent waiting for weights."""

    tokens: tuple[float, ...]
    stalls: tuple[float, ...]

    @property
    def steady_token(self) -> float:
        """Seconds per token in the long run: the mean of the second half of the simulated tokens."""
        return _mean(self.tokens[len(self.tokens) // 2 :])

    @property
    def steady_stall(self) -> float:
        """Seconds of waiting per token in the long run: the mean of the second half of the simulated tokens."""
        return _mean(self.stalls[len(self.stalls) // 2 :])

    @property
    def typical(self) -> tuple[float, float]:
        """Seconds per token, and seconds of waiting per token: medians of the second half of the simulated tokens."""
        from statistics import median

        half = len(self.tokens) // 2
        return median(self.tokens[half:]), median(self.stalls[half:])


def simulate(ring: Ring, costs: Costs, tokens: int = 8) -> Timeline:
    """Simulate `tokens` tokens of equal `costs`. The ring is empty at first; resident blocks are in memory."""
    return replay(ring, [costs], tokens)


def replay(ring: Ring, history: Sequence[Costs], tokens: int) -> Timeline:
    """Simulate `tokens` tokens, starting with an empty ring.

    `history` has the costs of one token each; the list is repeated as often as necessary.
    """
    streamed, period = set(ring.blocks), len(ring.blocks)
    released: list[float] = []
    now = loaded = 0.0
    token_seconds, token_stalls = [], []
    for token in range(tokens):
        begun, stalled, costs = now, 0.0, history[token % len(history)]
        for block, seconds in enumerate(costs.compute):
            if block in streamed:
                use = len(released)
                before = use - ring.lags[use % period]
                freed = released[before] if before >= 0 else 0.0
                loaded = max(loaded, freed + costs.start) + costs.load[block]
                wait = loaded + costs.wake - now if loaded > now else 0.0
                stalled += wait
                now += wait + seconds
                released.append(now)
            else:
                now += seconds
            now += costs.exchange[block]
        token_seconds.append(now - begun)
        token_stalls.append(stalled)
    return Timeline(tuple(token_seconds), tuple(token_stalls))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

"""Two-shot: a direct reduce-scatter (node r sums chunk r of all), then a direct all-gather of the chunk sums.

It takes two one-way latencies as a star does, but every link carries only 2 (n - 1) / n payloads each way. That is the
least of all algorithms. Large payloads travel in waves: while one part of the chunks is summed and sent on,
the next is still on its way. In f32 the result has the same bits as a star's. In a quantised wire format the chunk sums
are encoded again to travel back. Every node, including the one that summed the chunk, uses the decoded values.
"""

from collections.abc import Container

from allreduce._mailbox import quantise
from allreduce.base import F32
from allreduce.chunks import chunks
from allreduce.flight import Exchange
from allreduce.networked import Networked

Waves = list[tuple[slice, ...]]  # for each wave, the slice that each node sums in this wave

_WAVE_VALUES = 1 << 13  # least values in a message: more waves of smaller messages cost more than they save
_MOST_WAVES = 2
_DIRECT_VALUES = 1 << 14  # a reduce of fewer values goes straight to the master: one latency instead of two


class TwoShot(Networked):
    """A group in which each node sums one chunk: the least traffic on each link, for large payloads."""

    name = "two-shot"

    def partners(self) -> set[int]:
        """Return all other ranks: every node exchanges messages with every other."""
        return set(self.others)

    def _allreduce(self, values: F32) -> Exchange:
        return self._sum(values, range(self.size))

    def _reduce(self, values: F32) -> Exchange:
        return self._sum(values, (0,)) if values.size >= _DIRECT_VALUES else self._reduce_to_master(values)

    def _sum(self, values: F32, takers: Container[int]) -> Exchange:
        """Return a generator that sums the `values` of all nodes. The ranks in `takers` get the whole sum."""
        values = values.reshape(-1)
        waves = _waves(values.size, self.size)
        number = self.box.reserve(2 * len(waves))
        targets = [rank for rank in self.others if rank in takers]
        self._scatter(values, waves, number)
        yield
        total = self._buffer(values)
        for index, wave in enumerate(waves):
            mine = total[wave[self.rank]]
            if mine.size:
                self.box.sum(number + index, values[wave[self.rank]], mine, self.code)
                self.box.send(targets, number + len(waves) + index, mine, self.code)
                quantise(mine, self.code)
        yield
        if self.rank in takers:
            self._collect(waves, number + len(waves), total)
        return total

    def _scatter(self, values: F32, waves: Waves, number: int) -> None:
        """Send each other node its part of `values` in every wave.

        `number` is the number of the first of these messages.
        """
        parts = [(rank, number + index, values[wave[rank]]) for index, wave in enumerate(waves) for rank in self.others]
        self.box.send_all([((rank,), turn, part) for rank, turn, part in parts if part.size], self.code)

    def _collect(self, waves: Waves, number: int, total: F32) -> None:
        """Receive the parts of `total` that the other nodes summed.

        `number` is the number of the first of these messages.
        """
        for index, wave in enumerate(waves):
            for rank in self.others:
                if total[wave[rank]].size:
                    self.box.receive(rank, number + index, total[wave[rank]], self.code)


def _waves(count: int, size: int) -> Waves:
    """Divide `count` values into waves, and each wave into one slice for each of `size` nodes, which that node sums."""
    whole = chunks(count, size)
    number = min(_MOST_WAVES, max(1, whole[0].stop // _WAVE_VALUES))
    return list(zip(*(_parts(chunk, number) for chunk in whole), strict=True))


def _parts(chunk: slice, number: int) -> list[slice]:
    return [slice(chunk.start + one.start, chunk.start + one.stop) for one in chunks(chunk.stop - chunk.start, number)]

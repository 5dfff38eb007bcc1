"""A block whose units are fetched when they are wanted, as the block loop holds it: a `scheduler.weights.Demanded`."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Generic, TypeVar

from scheduler.demand.cache import DemandCache
from scheduler.weights import BlockHold, Hold, Wanted
from tpi.devices.pages import Bytes

S = TypeVar("S")


class DemandedBlock(Generic[S]):
    """Some segments that every step needs, and one for each unit that is in the cache or comes when it is wanted."""

    def __init__(
        self, block: int, always: Sequence[tuple[S, Hold]], units: Mapping[int, S], cache: DemandCache
    ) -> None:
        """`always` has one at least, which may be empty, so that a step that wants no unit here comes to something.

        What is wanted and `units` lacks is another node's.
        """
        self._block, self._always, self._units, self._cache = block, always, units, cache

    def wanting(self, wanted: Wanted) -> "DemandHold[S]":
        """See `scheduler.weights.Demanded`."""
        own = self._own(self._units if wanted is None else wanted)
        parts = [self._units[unit] for _, unit in own]
        return DemandHold(BlockHold(self._always), own, parts, self._cache)

    def expect(self, wanted: Wanted) -> None:
        """See `scheduler.weights.Demanded`."""
        if wanted is not None:
            self._cache.expect(self._own(wanted))

    def _own(self, wanted: Mapping[int, S] | Sequence[int]) -> list[tuple[int, int]]:
        return [(self._block, unit) for unit in wanted if unit in self._units]


class DemandHold(Generic[S]):
    """A `scheduler.weights.SegmentHold`: loads begin at once, and what is always there is computed meanwhile."""

    def __init__(
        self, always: BlockHold[S], keys: Sequence[tuple[int, int]], parts: Sequence[S], cache: DemandCache
    ) -> None:
        self._always, self._keys, self._parts, self._cache = always, keys, parts, cache
        self._stack = ExitStack()

    def __len__(self) -> int:
        return len(self._always) + len(self._parts)

    def __enter__(self) -> Iterator[tuple[S, Bytes]]:
        with ExitStack() as stack:
            walk = stack.enter_context(self._cache.follow(self._keys))
            made = self._walk(walk)
            stack.callback(made.close)  # what is given out is given back first
            self._stack = stack.pop_all()
        return made

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def _walk(self, units: Iterator[Bytes]) -> Generator[tuple[S, Bytes], None, None]:
        with self._always as parts:
            yield from parts
        yield from zip(self._parts, units, strict=True)

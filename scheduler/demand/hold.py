"""A block whose units, such as experts, are loaded when tokens choose them, as a `scheduler.weights.Demanded`."""

from collections.abc import Callable, Container, Generator, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from types import TracebackType
from typing import Generic, TypeVar

import numpy as np

from scheduler.demand.cache import DemandCache
from scheduler.weights import BlockHold, Hold, Wanted
from tpi.devices.pages import Bytes

S = TypeVar("S")
Gathered = Callable[[Sequence[tuple[int, Bytes]]], S]
"""Makes one segment of some units, each given with its weights."""

_NOTHING: Bytes = np.zeros(0, np.uint8)


class DemandedBlock(Generic[S]):
    """A block with segments that every step needs, and units that are loaded when tokens choose them."""

    def __init__(
        self,
        block: int,
        always: Sequence[tuple[S, Hold]],
        units: Sequence[int],
        cache: DemandCache,
        gathered: Gathered[S],
    ) -> None:
        """Create the block with number `block`.

        Args:
            always: the segments that every step computes, with their holds. There is at least one, which may be empty,
                so that every step has a result.
            units: the units that this node has; others belong to other nodes.
            cache: the cache that loads the units.
            gathered: makes one segment from units that are computed together.
        """
        self._block, self._always, self._cache, self._gathered = block, always, cache, gathered
        self._units, self._own = units, frozenset(units)

    def wanting(self, wanted: Wanted) -> "DemandHold[S]":
        """Return a hold of the segments that every step needs and of this node's units in `wanted`.

        `wanted` is None for all units.
        """
        units = self._units if wanted is None else _among(wanted, self._own)
        return DemandHold(BlockHold(self._always), self._block, units, self._cache, self._gathered)

    def expect(self, wanted: Wanted) -> None:
        """Announce that the next step will choose the units `wanted`; read them ahead while the disk is idle."""
        if wanted is not None:
            self._cache.expect([(self._block, unit) for unit in _among(wanted, self._own)])


class DemandHold(Generic[S]):
    """A `scheduler.weights.SegmentHold` of a block whose units are loaded while its other segments are computed.

    The units form one segment, or several if there is no room for all units at once.
    """

    def __init__(
        self, always: BlockHold[S], block: int, units: Sequence[int], cache: DemandCache, gathered: Gathered[S]
    ) -> None:
        self._always, self._units, self._cache, self._gathered = always, units, cache, gathered
        self._keys = [(block, unit) for unit in units]
        self._stack = ExitStack()

    def __len__(self) -> int:
        size = self._cache.group_size(len(self._units))
        return len(self._always) + -(-len(self._units) // size)

    def __enter__(self) -> Iterator[tuple[S, Bytes]]:
        with ExitStack() as stack:
            groups = stack.enter_context(self._cache.groups(self._keys))
            made = self._walk(groups)
            stack.callback(made.close)  # release the segments that were handed out first
            self._stack = stack.pop_all()
        return made

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def _walk(self, groups: Iterator[Sequence[Bytes]]) -> Generator[tuple[S, Bytes], None, None]:
        with self._always as parts:
            yield from parts
        units = iter(self._units)
        for group in groups:
            yield self._gathered(list(zip(islice(units, len(group)), group, strict=True))), _NOTHING


def _among(wanted: Sequence[int], own: Container[int]) -> list[int]:
    return [unit for unit in wanted if unit in own]

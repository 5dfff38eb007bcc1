"""Weights as the block loop asks for them: `with weights.hold(block, wanted) as segments`, then one by one.

A block's segments come one after the other, each when it is where it is computed; one that streams may be overwritten
as soon as the next is asked for. Whether a segment stays, streams or lies on another device is a matter of its hold.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Generic, TypeVar

from scheduler.window.window import Window
from tpi.devices.pages import Bytes

S = TypeVar("S")
Hold = AbstractContextManager[Bytes]
Wanted = Sequence[int] | None
"""Units of a block that a step needs; None: all of them."""


class Weights(Generic[S]):
    """The segments `S` of every block, in order of use."""

    def __init__(self, window: Window, blocks: Sequence[Sequence[tuple[S, Hold]]]) -> None:
        """`window` is what streams or keeps what lies in the host's memory; the holds of its segments are its own."""
        self.window = window
        self.blocks = [[segment for segment, _ in block] for block in blocks]
        self._held = [BlockHold(block) for block in blocks]

    def hold(self, block: int, wanted: Wanted = None) -> "BlockHold[S]":
        """The segments of `block` that hold `wanted`, for a `with`; each with its bytes.

        Raises:
            WeightsError: while iterating, if one could not be loaded; names the file.
        """
        return self._held[block]

    def expect(self, block: int, wanted: Wanted = None) -> None:
        """A hint that `wanted` of `block` will be held soon. Cyclic weights come in their order anyway."""


class BlockHold(Generic[S]):
    """The hold of one block: iterate over it inside its `with`."""

    __slots__ = ("_iterator", "_parts")

    def __init__(self, parts: Sequence[tuple[S, Hold]]) -> None:
        self._parts = parts
        self._iterator: Generator[tuple[S, Bytes], None, None] | None = None

    def __enter__(self) -> Iterator[tuple[S, Bytes]]:
        self._iterator = self._walk()
        return self._iterator

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        assert self._iterator is not None
        self._iterator.close()  # a segment is given back even if what was done with it failed

    def _walk(self) -> Generator[tuple[S, Bytes], None, None]:
        for segment, hold in self._parts:
            with hold as data:
                yield segment, data

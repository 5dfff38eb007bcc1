"""Weights as the block loop uses them: `with weights.hold(block, wanted) as segments`, then one segment at a time.

Iterating over a hold yields the block's segments in order, each once it is in the memory of the device that computes
it. A streamed segment may be overwritten as soon as the next one is requested. Each segment has a hold of its own,
which depends on whether it is resident, streamed or on another device. Long and short steps may be computed in
different places, so a node has one *arrangement* of its blocks, or two.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from scheduler.window.window import Window
from tpi.devices.pages import Bytes

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
Hold = AbstractContextManager[Bytes]
Held = Sequence[Sequence[tuple[S, Hold]]]
"""The segments of every block in order of use, each with its hold."""
Wanted = Sequence[int] | None
"""The units of a block that a step needs; None: all of them."""


class Arrangement(Generic[S]):
    """The segments of every block, in the order of use; `S` is a segment's type."""

    def __init__(
        self, blocks: Held[S], kept: Sequence[Bytes] | None, demanded: "Mapping[int, Demanded[S]] | None" = None
    ) -> None:
        """Create an arrangement from the segments of every block, each with its hold.

        Args:
            blocks: the segments of every block; for a block in `demanded`, the segments that every step needs.
            kept: the bytes of every block if each is one segment that is resident on the host; else None.
            demanded: blocks that have further units, which are loaded only when a step needs them.
        """
        self.blocks = [[segment for segment, _ in block] for block in blocks]
        self.demanded = demanded or {}
        self.single = all(len(block) == 1 for block in blocks)
        self.kept = kept if self.single and not demanded else None
        self.holds = [BlockHold(block) for block in blocks]


class SegmentHold(Protocol[S_co]):
    """Context manager for the segments of one block in a step; `len()` is their number."""

    def __len__(self) -> int: ...

    def __enter__(self) -> Iterator[tuple[S_co, Bytes]]: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None
    ) -> None: ...


class Demanded(Protocol[S_co]):
    """A block with units, such as experts, of which a step holds only those that it needs."""

    def wanting(self, wanted: Wanted) -> SegmentHold[S_co]:
        """Return a hold of the units that every step needs and of `wanted`, each unit once."""

    def expect(self, wanted: Wanted) -> None:
        """Announce that the units `wanted` will be held soon, so that they can be prefetched."""


class StepListener(Protocol):
    """An object with methods that are called when a step begins and when it fails."""

    def begin(self, short: bool) -> None:
        """Begin a step; raise the error of a transfer of an earlier step, if one failed.

        `short` is True if the step uses the arrangement for short steps.
        """

    def abandon(self) -> None:
        """Abort the present step, because it failed."""


class Weights(Generic[S]):
    """The weights of one node: its window, and the segments that use it."""

    def __init__(
        self,
        window: Window,
        arrangement: Arrangement[S],
        short: Arrangement[S] | None = None,
        crossover: int = 1,
        steps: "StepListener | None" = None,
    ) -> None:
        """Create the weights of a node from its window and its arrangements.

        Args:
            window: the host's memory of blocks, resident or streamed; the holds of its segments are in the
                arrangements.
            arrangement: the arrangement for steps of at least `crossover` tokens.
            short: the arrangement for shorter steps; None: `arrangement`.
            crossover: the least number of tokens of a step that uses `arrangement`.
            steps: an object whose methods are called when a step begins or fails.
        """
        self.window = window
        self.now = arrangement
        self._long, self._short, self._crossover = arrangement, short or arrangement, crossover
        self._steps = steps

    def begin(self, tokens: int) -> None:
        """Begin a step of `tokens` tokens; raise the error of a failed transfer that the last step did not wait for."""
        short = tokens < self._crossover
        self.now = self._short if short else self._long
        if self._steps is not None:
            try:
                self._steps.begin(short)
            except BaseException:
                self._steps.abandon()
                raise

    def abandon(self) -> None:
        """Abort the step: the keys and values that it appended to pages are invalid."""
        if self._steps is not None:
            self._steps.abandon()

    def hold(self, block: int, wanted: Wanted = None) -> SegmentHold[S]:
        """Return a context manager that yields the segments of `block` with the units `wanted`, each with its bytes.

        Raises:
            WeightsError: while iterating, if a segment could not be loaded; the message names the file.
        """
        demanded = self.now.demanded.get(block)
        return self.now.holds[block] if demanded is None else demanded.wanting(wanted)

    def expect(self, block: int, wanted: Wanted = None) -> None:
        """Announce that the units `wanted` of `block` will be held soon.

        Streamed weights are prefetched without this call.
        """
        if (demanded := self.now.demanded.get(block)) is not None:
            demanded.expect(wanted)


class BlockHold(Generic[S]):
    """Context manager of one block: iterate over it inside its `with`."""

    __slots__ = ("_iterator", "parts")

    def __init__(self, parts: Sequence[tuple[S, Hold]]) -> None:
        self.parts = parts
        self._iterator: Generator[tuple[S, Bytes], None, None] | None = None

    def __len__(self) -> int:
        return len(self.parts)

    def __enter__(self) -> Iterator[tuple[S, Bytes]]:
        self._iterator = self._walk()
        return self._iterator

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        assert self._iterator is not None
        self._iterator.close()  # releases the current segment even if the caller failed

    def _walk(self) -> Generator[tuple[S, Bytes], None, None]:
        for segment, hold in self.parts:
            with hold as data:
                yield segment, data

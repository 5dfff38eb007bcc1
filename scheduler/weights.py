"""Weights as the block loop asks for them: `with weights.hold(block, wanted) as segments`, then one by one.

A block's segments come one after the other, each when it is where it is computed; one that streams may be overwritten
as soon as the next is asked for. Whether a segment stays, streams or lies on another device is a matter of its hold.
Where a step is computed may depend on how long it is: a node has one *arrangement* of its blocks, or two.
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
"""Units of a block that a step needs; None: all of them."""


class Arrangement(Generic[S]):
    """The segments `S` of every block, in order of use."""

    def __init__(
        self, blocks: Held[S], kept: Sequence[Bytes] | None, demanded: "Mapping[int, Demanded[S]] | None" = None
    ) -> None:
        """`kept` are the bytes of every block, where each is one segment that stays in the host's memory; else None.

        The blocks of `demanded` are fetched as they are wanted; in `blocks` they have what they always need.
        """
        self.blocks = [[segment for segment, _ in block] for block in blocks]
        self.demanded = demanded or {}
        self.single = all(len(block) == 1 for block in blocks)
        self.kept = kept if self.single and not demanded else None
        self.holds = [BlockHold(block) for block in blocks]


class SegmentHold(Protocol[S_co]):
    """Segments that are held at one visit, for a `with`; its length is how many."""

    def __len__(self) -> int: ...

    def __enter__(self) -> Iterator[tuple[S_co, Bytes]]: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None
    ) -> None: ...


class Demanded(Protocol[S_co]):
    """A block of which only what a step wants is held."""

    def wanting(self, wanted: Wanted) -> SegmentHold[S_co]:
        """The hold of what it always needs and of these units, each given once."""

    def expect(self, wanted: Wanted) -> None:
        """These units will be wanted soon."""


class StepListener(Protocol):
    """What has to know of the beginning and the failure of steps."""

    def begin(self, short: bool) -> None:
        """A step begins; whether it is a short one. Raises what a transfer of an earlier one failed with."""

    def abandon(self) -> None:
        """It breaks off."""


class Weights(Generic[S]):
    """The weights of one node."""

    def __init__(
        self,
        window: Window,
        arrangement: Arrangement[S],
        short: Arrangement[S] | None = None,
        crossover: int = 1,
        steps: "StepListener | None" = None,
    ) -> None:
        """`window` is what streams or keeps what lies in the host's memory; the holds of its segments are its own.

        `short` is the arrangement for steps of fewer than `crossover` tokens; `steps` hears of every step.
        """
        self.window = window
        self.now = arrangement
        self._long, self._short, self._crossover = arrangement, short or arrangement, crossover
        self._steps = steps

    @property
    def arrangements(self) -> tuple[Arrangement[S], Arrangement[S]]:
        """Of long and of short steps; they may be the same."""
        return self._long, self._short

    def begin(self, tokens: int) -> None:
        """A step of so many tokens begins; raises what a transfer failed with that the last step did not wait for."""
        short = tokens < self._crossover
        self.now = self._short if short else self._long
        if self._steps is not None:
            self._steps.begin(short)

    def abandon(self) -> None:
        """The step breaks off: what it appended to pages means nothing."""
        if self._steps is not None:
            self._steps.abandon()

    def hold(self, block: int, wanted: Wanted = None) -> SegmentHold[S]:
        """The segments of `block` that hold `wanted`, for a `with`; each with its bytes.

        Raises:
            WeightsError: while iterating, if one could not be loaded; names the file.
        """
        demanded = self.now.demanded.get(block)
        return self.now.holds[block] if demanded is None else demanded.wanting(wanted)

    def expect(self, block: int, wanted: Wanted = None) -> None:
        """A hint that `wanted` of `block` will be held soon. Cyclic weights come in their order anyway."""
        if (demanded := self.now.demanded.get(block)) is not None:
            demanded.expect(wanted)


class BlockHold(Generic[S]):
    """The hold of one block: iterate over it inside its `with`."""

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
        self._iterator.close()  # a segment is given back even if what was done with it failed

    def _walk(self) -> Generator[tuple[S, Bytes], None, None]:
        for segment, hold in self.parts:
            with hold as data:
                yield segment, data

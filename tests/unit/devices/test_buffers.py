"""Buffers for a card's kernels, without a card: reused, never more than were in use at once, within the limit."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpi.devices.arena import Arena
from tpi.devices.opencl.buffers import BufferPool, PooledBuffer
from tpi.devices.pages import PAGE
from tpi.errors import DeviceFullError

STEP = 256  # bytes


@dataclass
class FakeBuffer:
    """A buffer without memory."""

    size: int
    released: bool = False

    def release(self) -> None:
        assert not self.released
        self.released = True


class FakeCard:
    """A card that counts its buffers, and the pool's waits for it."""

    def __init__(self) -> None:
        self.made: list[FakeBuffer] = []
        self.waits = 0
        self.pool = BufferPool("card", self.create, self.wait)

    def create(self, size: int) -> FakeBuffer:
        self.made.append(FakeBuffer(size))
        return self.made[-1]

    def wait(self) -> None:
        self.waits += 1

    @property
    def nbytes(self) -> int:
        return sum(buffer.size for buffer in self.made if not buffer.released)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20 * STEP)), max_size=40), st.integers(2, 12))
def test_memory_never_exceeds_the_peak_use_or_the_limit(steps: list[tuple[bool, int]], pages: int) -> None:
    """Buffers are taken and returned at random; a buffer has one user at a time."""
    card, arena = FakeCard(), Arena("card", pages * PAGE)
    held = arena.allocate(PAGE)
    taken: list[PooledBuffer] = []
    most = 0
    for take, size in steps:
        if not take and taken:
            taken.pop(size % len(taken))
            continue
        in_use = sum(each.buffer.size for each in taken)
        try:
            taken.append(card.pool.take(size, arena))
        except DeviceFullError:
            assert in_use + size + held.size > pages * PAGE - STEP
        most = max(most, sum(each.buffer.size for each in taken))
        assert len({id(each.buffer) for each in taken}) == len(taken)
        assert not any(each.buffer.released for each in taken)
        assert card.nbytes == card.pool.nbytes <= min(max(most, in_use + size + STEP), (pages - 1) * PAGE)


def test_the_same_sizes_again_make_nothing_new() -> None:
    card, arena = FakeCard(), Arena("card", 8 * PAGE)
    for _ in range(5):
        first, second = (card.pool.take(size, arena) for size in (1000, 300))
        del first, second
    assert len(card.made) == 2
    assert card.waits == 0


def test_weights_replace_held_buffers_and_not_those_in_use() -> None:
    card = FakeCard()
    arena = Arena("card", 4 * PAGE, other_use=card.pool.trim)
    used, held = (card.pool.take(PAGE, arena) for _ in range(2))
    del held
    assert card.pool.nbytes == 2 * PAGE
    arena.allocate(3 * PAGE)
    assert card.pool.nbytes == PAGE
    with pytest.raises(DeviceFullError, match=f"needs {5 * PAGE}"):
        arena.allocate(PAGE)
    with pytest.raises(DeviceFullError, match=f"may use {4 * PAGE} bytes .* needs {4 * PAGE + STEP}"):
        card.pool.take(1, arena)
    assert not used.buffer.released


def test_memory_being_allocated_counts_as_used() -> None:
    """While memory is being allocated, the buffers of kernels may take only what that leaves."""
    seen: list[int] = []

    def other_use(left: int) -> int:
        seen.append(arena.used)
        return 0 if len(seen) == 1 else left + 1

    arena = Arena("card", 4 * PAGE, other_use=other_use)
    held = arena.allocate(PAGE)
    with pytest.raises(DeviceFullError):
        arena.allocate(2 * PAGE)
    assert seen == [PAGE, 3 * PAGE]
    assert arena.used == PAGE
    arena.free(held)
    assert arena.used == 0

"""Arrays that name a device's memory, and copies that outlive their caller, without Triton."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.devices.cpu_backend import CpuBackend
from tpi.devices.arena import Arena
from tpi.devices.cuda.backend import CudaBackend
from tpi.devices.cuda.copies import CudaCopies
from tpi.devices.cuda.device import Staging
from tpi.devices.cuda.tensors import TensorTable
from tpi.devices.pages import PAGE, Bytes
from tpi.errors import DeviceError

LIMIT = 12 * PAGE


class FullBackend(CpuBackend):
    """A backend without free memory."""

    def zeros(self, size: int) -> Any:
        raise MemoryError


@given(
    st.lists(st.tuples(st.sampled_from(["allocate", "free", "fill"]), st.integers(0, 5 * PAGE), st.integers(0, 255)))
)
def test_an_array_names_its_own_bytes(steps: list[tuple[str, int, int]]) -> None:
    """Whatever was allocated and freed before, a slice of an array is the same slice of its tensor."""
    names = TensorTable(CpuBackend())
    arena = Arena("card", LIMIT, names.allocate, names.release)
    held: list[tuple[Bytes, Any]] = []  # with what it should hold
    for step, number, value in steps:
        if step == "allocate" and arena.used + number + PAGE <= LIMIT and number:
            held.append((arena.allocate(number), np.zeros(number, np.uint8)))
        elif step == "free" and held:
            arena.free(held.pop(number % len(held))[0])
        elif step == "fill" and held:
            array, expected = held[number % len(held)]
            begin = number % array.size
            names.tensor(array[begin:]).fill_(value)
            expected[begin:] = value
        for array, expected in held:
            np.testing.assert_array_equal(names.tensor(array).numpy(), expected)
    starts = sorted(array.ctypes.data for array, _ in held)
    assert all(start % PAGE == 0 for start in starts)
    assert all(after - before >= PAGE for before, after in pairwise(starts))


def test_views_keep_their_dtype_and_shape() -> None:
    names = TensorTable(CpuBackend())
    memory = names.allocate(PAGE)
    names.tensor(memory).copy_(torch.arange(PAGE) % 251)
    pages = memory.view(np.float16).reshape(4, 2, -1)
    found = names.tensor(pages[1])
    assert (found.dtype, tuple(found.shape)) == (torch.float16, (2, PAGE // 16))
    np.testing.assert_array_equal(found.numpy(), pages[1])
    assert tuple(names.tensor(memory[:0]).shape) == (0,)
    for wrong in (memory[::2], pages.T, memory.view(np.float64)):
        with pytest.raises(DeviceError, match="contiguous uint8, int8, float16 or float32"):
            names.tensor(wrong)
    names.release(memory)
    names.release(memory)
    for gone in (memory, np.zeros(3, np.uint8)):
        with pytest.raises(DeviceError, match="or was freed"):
            names.tensor(gone)


def test_memory_that_the_card_does_not_have() -> None:
    names = TensorTable(FullBackend())
    arena = Arena("card", None, names.allocate, names.release)
    with pytest.raises(DeviceError, match=f"does not have {PAGE} bytes left"):
        arena.allocate(5)
    assert arena.used == 0


class PinningBackend(CpuBackend):
    """A backend that records what is pinned, and fails on request."""

    def __init__(self, refuses: bool = False, fails: bool = False) -> None:
        self.pinned: dict[int, int] = {}
        self.refuses, self.fails = refuses, fails

    def pin(self, address: int, size: int) -> Callable[[], object] | None:
        if self.fails:
            raise RuntimeError("CUDA error: unspecified launch failure")
        if self.refuses:
            return None
        self.pinned[address] = size
        return lambda: self.pinned.pop(address)


def test_pages_are_pinned_until_nothing_refers_to_them() -> None:
    """Only 5 pages are pinned; torch's own allocation would round them up to 8."""
    backend = PinningBackend()
    staging = Staging(backend)
    memory = staging.allocate(4 * PAGE + 1)
    assert backend.pinned == {memory.ctypes.data: 5 * PAGE}
    assert (memory.size, memory.ctypes.data % PAGE) == (5 * PAGE, 0)
    assert not memory.any()
    part = memory[PAGE:].view(np.float32).reshape(2, -1)
    part[:] = 1
    del memory
    gc.collect()
    assert list(backend.pinned.values()) == [5 * PAGE]
    del part
    gc.collect()
    assert not backend.pinned
    assert staging.allocate(0).size == 0
    assert not backend.pinned


def test_the_end_unpins_all_and_leaves_the_memory() -> None:
    backend = PinningBackend()
    staging = Staging(backend)
    held = [staging.allocate(PAGE) for _ in range(3)]
    staging.close()
    staging.close()
    assert not backend.pinned
    held[0][:] = 7
    del held
    gc.collect()
    assert not backend.pinned


@pytest.mark.parametrize("how", [{"refuses": True}, {"fails": True}])
def test_a_failure_to_pin_is_reported_once(how: dict[str, bool], capsys: pytest.CaptureFixture[str]) -> None:
    staging = Staging(PinningBackend(**how))
    for _ in range(2):
        assert staging.allocate(3 << 20).size == 3 << 20
    assert capsys.readouterr().err == (
        "tpi: cuda (emulated): the driver cannot pin 3MiB of memory, so copies are slower\n"
    )


@pytest.mark.parametrize("code", [0, 2, 712])
def test_a_card_pins_through_the_runtime_and_absorbs_its_refusal(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """The CUDA runtime reports an error again at the next launch, so the error must be cleared."""
    calls: list[object] = []

    def register(*given: int) -> int:
        calls.append(given)
        return code

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=calls.append)

    def launch(*_: object, **__: object) -> None:
        calls.append("launch")
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", launch)
    unpin = CudaBackend(0).pin(PAGE, 2 * PAGE)
    assert (unpin is None) == bool(code)
    if unpin is not None:
        unpin()
    assert calls == [(PAGE, 2 * PAGE, 1), "launch" if code else PAGE]


class SlowLane:
    """A lane whose marks are reached, or fail, when a test says so."""

    def __init__(self) -> None:
        self.marks: list[SlowMark] = []

    @contextmanager
    def use(self) -> Iterator[None]:
        yield

    def mark(self) -> "SlowMark":
        self.marks.append(SlowMark())
        return self.marks[-1]


class SlowMark:
    def __init__(self) -> None:
        self.done = False
        self.waited = 0
        self.error: Exception | None = None

    def wait(self) -> None:
        self.waited += 1
        if self.error:
            raise self.error


def begin(copies: CudaCopies, source: Bytes) -> Any:
    target = np.zeros_like(source)
    return copies.copy(torch.from_numpy(source), torch.from_numpy(target), (source, target))


def test_both_ends_live_until_an_unawaited_copy_ends() -> None:
    lane = SlowLane()
    copies, source = CudaCopies("card", lane), np.arange(5, dtype=np.uint8)
    kept = ref(source)
    begin(copies, source)
    del source
    assert kept() is not None
    lane.marks[0].done = True
    begin(copies, np.zeros(5, np.uint8))  # forgets those that have ended
    assert kept() is None
    copies.close()
    assert [mark.waited for mark in lane.marks] == [0, 1]


def test_a_failed_copy_raises_in_the_waiting_thread() -> None:
    lane = SlowLane()
    copies = CudaCopies("card", lane)
    good, bad = (begin(copies, np.zeros(5, np.uint8)) for _ in range(2))
    lane.marks[1].error = RuntimeError("an illegal memory access")
    copies.close()
    good.wait()
    for _ in range(2):
        with pytest.raises(DeviceError, match="a copy to or from card failed: an illegal memory access"):
            bad.wait()
    assert not good.done
    lane.marks[0].done = True
    assert good.done


def test_a_copy_that_cannot_begin_fails_when_it_is_awaited() -> None:
    copies = CudaCopies("card", SlowLane())
    five, six = np.zeros(5, np.uint8), np.zeros(6, np.uint8)
    event = copies.copy(torch.from_numpy(five), torch.from_numpy(six), (five, six))
    assert event.done
    with pytest.raises(DeviceError, match="failed"):
        event.wait()

"""The memory of an OpenCL device: buffers named by addresses, copies with real events, never above its limit."""

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.devices.opencl_device import fetched, hold, holding, opencl_device
from tests.support.kernels.kernel_cases import ffn_case, reference
from tpi.devices.arena import cuts_between
from tpi.devices.base import wait_all
from tpi.devices.opencl.addresses import Addresses
from tpi.devices.opencl.copies import pinned
from tpi.devices.opencl.device import OpenClDevice
from tpi.devices.pages import PAGE, Bytes, round_up
from tpi.errors import DeviceError, DeviceFullError, KernelError
from tpi.kernels.spec import F32

LIMIT = 12 * PAGE


@pytest.fixture
def small() -> Any:
    """A device of its own, with little memory."""
    with opencl_device(LIMIT) as device:
        yield device


@given(
    st.lists(
        st.tuples(st.sampled_from(["allocate", "free", "write", "move"]), st.integers(0, 5 * PAGE), st.integers(0, 99)),
        max_size=20,
    )
)
@settings(max_examples=30)
def test_what_is_written_is_read_back_whatever_else_is_done(
    card: OpenClDevice, steps: list[tuple[str, int, int]]
) -> None:
    """Random copies of slices, between the host and the device and within it, compared with arrays of the host."""
    held: list[tuple[Bytes, Bytes]] = []  # on the device, and what it must hold
    random = np.random.default_rng(1)
    try:
        for name, size, number in steps:
            if name == "allocate":
                held.append((card.memory.allocate(size), np.zeros(size, np.uint8)))
            elif held and name == "free":
                card.memory.free(held.pop(number % len(held))[0])
            elif held:
                there, model = held[number % len(held)]
                first = min(size, model.size) // 2
                _change(card, name, there[first:], model[first:], held[size % len(held)], random)
            for there, model in held:
                np.testing.assert_array_equal(fetched(card, there), model)
    finally:
        for there, _ in held:
            card.memory.free(there)


def _change(
    card: OpenClDevice, name: str, there: Bytes, model: Bytes, other: tuple[Bytes, Bytes], random: np.random.Generator
) -> None:
    """Fill a buffer from the host, or copy as much of the other buffer as fits."""
    if name == "write":
        model[:] = random.integers(0, 256, model.size)
        card.copy(model, there).wait()
        return
    source, source_model = other
    size = min(source.size, there.size)
    if there.base is source.base or there.base is source:
        return  # a copy within one buffer may not overlap
    card.copy(source[:size], there[:size]).wait()
    model[:size] = source_model[:size]


def test_the_limit_is_kept(small: OpenClDevice) -> None:
    first = small.memory.allocate(10 * PAGE - 5)
    with pytest.raises(DeviceFullError, match=rf"opencl:0 .* may use {LIMIT} bytes .* needs {13 * PAGE}") as caught:
        small.memory.allocate(2 * PAGE + 1)
    assert caught.value.least == 13 * PAGE
    assert small.memory.used == round_up(first.size) == 10 * PAGE
    small.memory.free(first)
    assert (fetched(small, small.memory.allocate(LIMIT)) == 0).all()


def test_memory_in_one_piece_is_limited_by_the_card(card: OpenClDevice) -> None:
    most = cl.get_platforms()[0].get_devices()[0].max_mem_alloc_size
    memory = type(card.memory)("huge", None, card.memory._allocate, card.memory._release)
    with pytest.raises(DeviceError, match=f"at most {most} bytes in one piece"):
        memory.allocate(most + PAGE)
    assert memory.used == 0


def test_views_of_an_array_name_their_bytes(card: OpenClDevice) -> None:
    values = np.arange(600, dtype=np.float32).reshape(3, 4, 50)
    with holding(card, values) as (there,):
        np.testing.assert_array_equal(fetched(card, there[1]), values[1])
        np.testing.assert_array_equal(fetched(card, there[2, 1:3]), values[2, 1:3])
        assert card.memory.owns(there[:, ::2])
        with pytest.raises(DeviceError, match="contiguous bytes"):
            card.copy(there.reshape(-1).view(np.uint8)[::2], np.empty(1200, np.uint8))


def test_a_name_cannot_pass_for_its_text() -> None:
    code = "from tpi.devices.opencl.addresses import reserve; print(reserve(4096)[7])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert ended.returncode < 0
    assert not ended.stdout


@pytest.mark.parametrize("of", ["{}", "{}[8:]", "{}.view('f4').reshape(2, -1)"])
def test_a_name_is_printed_and_what_it_names_is_not(of: str) -> None:
    """A failing test prints every argument, and a dataclass its fields."""
    taken = of.format("reserve(4096)")
    code = f"from tpi.devices.opencl.addresses import reserve; one = {taken}; print(repr(one), one, f'{{one}}')"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
    assert shown.count("of a device, named by 0x") == 3


def test_copies_that_do_not_fit_are_refused(card: OpenClDevice) -> None:
    here = np.arange(PAGE, dtype=np.uint8)
    fixed = here.copy()
    fixed.flags.writeable = False
    with holding(card, here) as (there,):
        with pytest.raises(DeviceError, match="one end"):
            card.copy(here, here.copy())
        with pytest.raises(DeviceError, match="arrays of one size"):
            card.copy(here, there[1:])
        with pytest.raises(DeviceError, match="writable memory"):
            card.copy(there, fixed)
        assert card.copy(there[:0], here[:0]).done
        overlapping = card.copy(there[:100], there[50:150])
        for _ in range(2):
            with pytest.raises(DeviceError, match="failed"):
                overlapping.wait()


def test_a_copy_ends_when_it_ends(small: OpenClDevice) -> None:
    """Copies of one direction are delayed; those of the other direction pass them."""
    there, other = small.memory.allocate(PAGE), small.memory.allocate(PAGE)
    here, back = np.full(PAGE, 7, np.uint8), np.full(PAGE, 9, np.uint8)
    gate = cl.UserEvent(small._card.context)
    cl.enqueue_barrier(small._copies._coming, wait_for=[gate])
    try:
        upload = small.copy(here, there)
        small.copy(other, back).wait()
        assert not back.any()
        assert not upload.done
    finally:
        gate.set_status(cl.command_execution_status.COMPLETE)
    wait_all([upload, upload])
    assert upload.done
    np.testing.assert_array_equal(fetched(small, there), here)


class Room:
    """A `pyopencl.Buffer` of a number of bytes; all of them are listed."""

    def __init__(self, size: int, made: list["Room"]) -> None:
        self.size, self.made = size, made
        made.append(self)

    def release(self) -> None:
        self.made.remove(self)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(1, 40),
)
@settings(max_examples=60)
def test_memory_that_may_be_cut_consists_of_small_buffers(slots: list[int], most: int) -> None:
    """Every slot is in one buffer, at the offset that the slot has in it."""
    made: list[Room] = []
    addresses = Addresses("card", lambda size: Room(size, made), lambda: most * PAGE)
    ends = [sum(slots[: at + 1]) * PAGE for at in range(len(slots))]
    memory = addresses.allocate_cut(ends[-1], cuts_between(zip([0, *ends], ends, strict=False)))
    other = addresses.allocate(PAGE)
    assert all(room.size <= most * PAGE or room.size in {slot * PAGE for slot in slots} for room in made)
    assert most < max(slots) or len(made) - 1 <= 2 * -(-sum(slots) // most)
    taken: dict[int, int] = {}
    for begin, end in zip([0, *ends], ends, strict=False):
        buffer, offset = addresses.locate(memory[begin:end])
        assert offset == taken.get(id(buffer), 0)
        taken[id(buffer)] = offset + end - begin
    if len(made) > 2:
        with pytest.raises(DeviceError, match="is not in the memory"):
            addresses.locate(memory)
    addresses.release(memory)
    assert [room.size for room in made] == [PAGE]
    addresses.release(other)
    assert not made


def test_a_refused_part_gives_back_those_before_it() -> None:
    made: list[Room] = []

    def create(size: int) -> Room:
        if len(made) == 2:
            raise DeviceError("no more")
        return Room(size, made)

    with pytest.raises(DeviceError, match="no more"):
        Addresses("card", create, lambda: PAGE).allocate_cut(3 * PAGE, [PAGE, 2 * PAGE])
    assert not made


def test_slots_work_on_a_device_with_small_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arena has three blocks; the driver gives memory for one at a time."""
    with opencl_device(1 << 22) as device:
        cases = [ffn_case(np.random.default_rng(seed), format="q8", tokens=2) for seed in range(3)]
        size = round_up(cases[0].data.size)
        monkeypatch.setattr(device._card, "largest", lambda: size + PAGE)
        monkeypatch.setattr(device._card.addresses, "_most", lambda: size + PAGE)
        with pytest.raises(DeviceError, match="in one piece"):
            device.memory.allocate(3 * size)
        memory = device.memory.allocate(3 * size, [size, 2 * size])
        for at, case in enumerate(cases):
            slot = memory[at * size :][: case.data.size]
            device.copy(case.data, slot).wait()
            np.testing.assert_allclose(
                device.kernels.ffn(case.spec, slot, case.x),
                reference.ffn(case.spec, case.data, case.x),
                rtol=0,
                atol=1e-3,
            )
        device.memory.free(memory)
        assert device.memory.used == 0


class Failed:
    """A `pyopencl.Event` of a command that failed; PoCL aborts at the failures that a test could really cause."""

    command_execution_status = -5

    def wait(self) -> None:
        raise cl.RuntimeError("out of resources")


def test_a_copy_that_fails_says_so_where_it_is_awaited(card: OpenClDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    with holding(card, np.ones(PAGE, np.uint8)) as (there,):
        with monkeypatch.context() as patched:
            patched.setattr(cl, "enqueue_copy", lambda *_, **__: Failed())
            upload = card.copy(np.ones(PAGE, np.uint8), there)
        assert upload.done
        for _ in range(2):
            with pytest.raises(DeviceError, match=r"opencl:0 .* failed: out of resources"):
                upload.wait()


@pytest.mark.parametrize("error", [cl.RuntimeError("device lost"), OSError("no cache"), UnicodeError("a driver's log")])
def test_a_failing_device_is_one_sentence_and_closes_quietly(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    with opencl_device(LIMIT) as device:
        case = ffn_case(np.random.default_rng(1), format="q4", tokens=2)
        there = device.memory.allocate(case.data.size)
        for name in ("enqueue_copy", "Buffer", "enqueue_fill_buffer"):
            monkeypatch.setattr(cl, name, refuse)
        device._card._queue = SimpleNamespace(finish=refuse)
        failing: list[Callable[[], object]] = [
            device.copy(case.data, there).wait,
            device.start(lambda: device.kernels.ffn(case.spec, there, case.x)).wait,
            lambda: device.memory.allocate(PAGE),
        ]
        for call in failing:
            with pytest.raises(DeviceError, match=rf"opencl:0 .* failed: .*{error}; give a smaller") as caught:
                call()
            assert "\n" not in str(caught.value)
        device.close()


def test_calls_are_made_in_order_and_fail_where_they_are_awaited(card: OpenClDevice) -> None:
    case = ffn_case(np.random.default_rng(1), format="q4", tokens=2)
    go, order = threading.Event(), list[int]()

    def first() -> None:
        assert go.wait(60)
        order.append(1)

    def second() -> F32:
        order.append(2)
        return card.kernels.ffn(case.spec, data, case.x)

    with holding(card, case.data) as (data,):
        expected = card.kernels.ffn(case.spec, data, case.x)
        begun = card.start(first)
        failing = card.start(lambda: card.kernels.ffn(case.spec, case.data, case.x))
        right = card.start(second)
        assert not begun.done
        assert not right.done
        go.set()
        np.testing.assert_array_equal(right.wait(), expected)
        assert order == [1, 2]
        for _ in range(2):
            with pytest.raises(DeviceError, match="weights must lie"):
                failing.wait()


def test_memory_to_stage_in(card: OpenClDevice) -> None:
    """Pinned memory is for cards with memory of their own. PoCL's memory shows that it can be used."""
    for memory in (card.staging(3 * PAGE - 1), pinned(card._card.context, card._copies._coming, 3 * PAGE - 1)):
        assert memory.shape == (3 * PAGE,)
        assert memory.ctypes.data % PAGE == 0
        assert not memory.any()
        memory[:] = np.arange(3 * PAGE) % 251
        with holding(card, memory) as (there,):
            np.testing.assert_array_equal(fetched(card, there), memory)
    assert card.staging(0).size == 0


def test_closing_ends_its_threads_and_its_memory() -> None:
    before = set(threading.enumerate())
    with opencl_device() as device:
        with closing(device):
            case = ffn_case(np.random.default_rng(2))
            data = hold(device, case.data)
            slow = device.start(lambda: device.kernels.ffn(case.spec, data, case.x))
            assert set(threading.enumerate()) > before
        assert slow.done
        assert set(threading.enumerate()) <= before
        with pytest.raises(RuntimeError):
            device.start(device.close)
        with pytest.raises(DeviceError, match="is not in the memory"):
            device.kernels.ffn(case.spec, data, case.x)


def test_a_program_that_does_not_compile_is_a_kernel_error(card: OpenClDevice) -> None:
    from tpi.devices.opencl.programs import Program

    with pytest.raises(KernelError, match="refuses"), card._card.working():
        card._card.launch(Program(("kv",), ("HEAD_DIM=nonsense",)), "none", [1])

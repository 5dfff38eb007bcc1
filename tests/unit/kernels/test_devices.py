"""Devices: an arena keeps its limit and its memory; copies and calls end or fail where they are awaited."""

from dataclasses import replace
from itertools import pairwise
from threading import Event as Flag
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.devices.twin import Twin
from tests.support.kernels.kernel_cases import AttentionCase, FfnCase, attention_case, ffn_case, native
from tpi.devices.arena import Arena, bounds
from tpi.devices.base import Device, Finished, wait_all
from tpi.devices.host import HostDevice
from tpi.devices.pages import PAGE, Bytes, round_up
from tpi.errors import DeviceError, DeviceFullError, KernelError
from tpi.kernels.spec import F32, AttentionSpec, FfnSpec

LIMIT = 12 * PAGE
ALLOCATE = st.tuples(st.just("allocate"), st.integers(0, 6 * PAGE), st.integers(0, 255))
OTHERS = st.tuples(st.sampled_from(["free", "copy"]), st.integers(0, 20), st.integers(0, 20))


@given(st.lists(st.one_of(ALLOCATE, OTHERS), max_size=30))
def test_an_arena_never_exceeds_its_limit_nor_gives_memory_twice(steps: list[tuple[str, int, int]]) -> None:
    host = HostDevice(native, Arena("host", LIMIT))
    held: list[tuple[Bytes, int]] = []  # with the value that fills it
    for name, first, second in steps:
        if name == "allocate":
            held += allocated(host.memory, first, second)
        elif held and name == "free":
            host.memory.free(held.pop(first % len(held))[0])
        elif held:
            copied(host, held, first % len(held), second % len(held))
        check_model(host.memory, held)


def allocated(arena: Arena, size: int, fill: int) -> list[tuple[Bytes, int]]:
    """Return a list of the filled buffer; empty if it does not fit, in which case the error names the least limit."""
    needed = arena.used + round_up(size)
    if needed > LIMIT:
        with pytest.raises(DeviceFullError, match=f"needs {needed}") as caught:
            arena.allocate(size)
        assert caught.value.least == needed
        return []
    memory = arena.allocate(size)
    assert memory.shape == (size,)
    assert not memory.any()
    memory.fill(fill)
    return [(memory, fill)]


def copied(host: HostDevice, held: list[tuple[Bytes, int]], source: int, target: int) -> None:
    """Copy one buffer to another; check that copies of different sizes are refused."""
    if held[source][0].size != held[target][0].size:
        with pytest.raises(DeviceError, match="arrays of one size"):
            host.copy(held[source][0], held[target][0])
        return
    event = host.copy(held[source][0], held[target][0])
    assert event.done
    event.wait()
    held[target] = (held[target][0], held[source][1])


def check_model(arena: Arena, held: list[tuple[Bytes, int]]) -> None:
    """Check that used bytes are the held ones, within the limit, that none overlap, and that values are kept."""
    assert arena.used == sum(round_up(memory.size) for memory, _ in held) <= LIMIT
    spans = sorted(bounds(memory) for memory, _ in held if memory.size)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for memory, fill in held:
        assert (memory == fill).all()
        assert arena.owns(memory[1:-1])


def test_an_arena_knows_its_own() -> None:
    arena, other = Arena("one"), Arena("other")
    mine, foreign = arena.allocate(3 * PAGE), other.allocate(PAGE)
    pages = mine.view(np.float32).reshape(3, -1)
    for inside in (mine, mine[5:9], mine[::-2], pages[1], pages.T, mine[:0], foreign[:0]):
        assert arena.owns(inside)
        arena.check("pages", inside)
    for outside in (foreign, np.zeros(8, np.float32)):
        assert not arena.owns(outside)
        with pytest.raises(DeviceError, match="pages must lie in the memory of one"):
            arena.check("pages", outside)
    for wrong in (foreign, mine[1:], mine[PAGE:]):
        with pytest.raises(DeviceError, match="not allocated by one"):
            arena.free(wrong)
    arena.free(mine)
    assert (arena.used, arena.owns(mine)) == (0, False)
    with pytest.raises(DeviceError, match="freed before"):
        arena.free(mine)


def test_failures_surface_where_they_are_awaited() -> None:
    def fail() -> int:
        raise KernelError("broken")

    def stop() -> int:
        raise KeyboardInterrupt

    host = HostDevice(native)
    pending = host.start(fail)
    assert pending.done
    for _ in range(2):
        with pytest.raises(KernelError, match="broken"):
            pending.wait()
    with pytest.raises(KeyboardInterrupt):
        host.start(stop)


def test_nothing_is_left_running_when_one_fails() -> None:
    ended = Flag()

    def fail() -> bool:
        raise KernelError("broken")

    with Twin(native) as twin:
        go = Flag()

        def slow() -> bool:
            assert go.wait(30)
            ended.set()
            return True

        beside = twin.start(slow)
        assert not beside.done
        failed = Finished(fail)
        go.set()
        with pytest.raises(KernelError, match="broken"):
            wait_all([failed, beside])
        assert ended.is_set()
        assert wait_all([beside, beside]) == [True, True]


def test_copies_of_a_second_device_touch_its_own_memory() -> None:
    with Twin(native, limit=2 * PAGE) as twin:
        there, here = twin.memory.allocate(PAGE), np.arange(PAGE, dtype=np.uint8)
        twin.copy(here, there).wait()
        back = np.zeros_like(here)
        twin.copy(there, back).wait()
        np.testing.assert_array_equal(back, here)
        with pytest.raises(DeviceError, match="one end"):
            twin.copy(here, back)
        with pytest.raises(DeviceFullError, match=r"twin may use 8192 bytes .* needs 12288"):
            twin.memory.allocate(PAGE + 1)


def ffn_halves(case: FfnCase) -> list[FfnCase]:
    """Return the first units of a feed-forward block, and the others."""
    run, middle = case.spec.neuron, case.spec.neuron.units // 2
    parts = []
    for first, last in ((0, middle), (middle, run.units)):
        spec = replace(case.spec, neuron=replace(run, units=last - first))
        parts.append(FfnCase(spec, case.data[first * run.unit_bytes : last * run.unit_bytes], case.x))
    return parts


def attention_halves(case: AttentionCase) -> list[AttentionCase]:
    """Return the first half of the query and KV heads, and the others."""
    return [attention_half(case, half) for half in (0, 1)]


def attention_half(case: AttentionCase, half: int) -> AttentionCase:
    spec, split = case.spec, case.spec.query.units * case.spec.query.unit_bytes
    data = [halved(case.data[:split], half), halved(case.data[split:], half)]
    one = replace(
        spec,
        query=replace(spec.query, units=spec.query.units // 2),
        kv=replace(spec.kv, units=spec.kv.units // 2),
        heads=spec.heads // 2,
        kv_heads=spec.kv_heads // 2,
        kv_index=halved(spec.kv_index, half) - np.int32(half * spec.kv_heads // 2),
    )
    heads = slice(half * one.kv_heads, (half + 1) * one.kv_heads)
    keys, values = (
        {layer: each[:, heads].copy() for layer, each in caches.items()} for caches in (case.kv.keys, case.kv.values)
    )
    return AttentionCase(one, np.concatenate(data), case.x, replace(case.kv, keys=keys, values=values), case.batch)


def halved(array: Any, half: int) -> Any:
    middle = len(array) // 2
    return array[middle:] if half else array[:middle]


def ffn_on(device: Device, case: FfnCase, data: Bytes) -> F32:
    """Compute a feed-forward block where its weights are, from an input that the host prepared."""
    host = native.prepare(case.spec, case.x)
    prepared = host if device.kernels is native else device.kernels.prepare(case.spec, host)
    return device.kernels.ffn(case.spec, data, prepared)


@pytest.mark.parametrize("tokens", [1, 20])
def test_a_second_device_takes_half_of_the_neurons(tokens: int) -> None:
    case = ffn_case(np.random.default_rng(1), format="f32", units=6, tokens=tokens, activation="relu")
    first, second = ffn_halves(case)
    alone = native.ffn(first.spec, first.data, case.x) + native.ffn(second.spec, second.data, case.x)
    host = HostDevice(native)
    with Twin(native) as twin:
        data = twin.hold(second.data)
        beside = twin.start(lambda: ffn_on(twin, second, data))
        here = host.start(lambda: ffn_on(host, first, first.data))
        mine, theirs = wait_all([here, beside])
        np.testing.assert_array_equal(mine + theirs, alone)
        np.testing.assert_allclose(alone, native.ffn(case.spec, case.data, case.x), atol=1e-5)
        refuses_what_is_elsewhere(twin, second.spec, second, data)


def refuses_what_is_elsewhere(twin: Twin, spec: FfnSpec, case: FfnCase, data: Bytes) -> None:
    with pytest.raises(DeviceError, match="weights must lie in the memory of twin"):
        twin.kernels.ffn(spec, case.data, case.x)
    with pytest.raises(KernelError, match="other kernels"):
        twin.kernels.ffn(spec, data, native.prepare(spec, case.x))
    twin.memory.free(data)
    with pytest.raises(DeviceError, match="weights must lie"):
        twin.kernels.ffn(spec, data, case.x)


@pytest.mark.parametrize("tokens", [1, 20])
def test_a_second_device_takes_half_of_the_heads(tokens: int) -> None:
    case = attention_case(
        np.random.default_rng(2), heads=4, kv_heads=2, head_dim=32, hidden=96, lengths=((40, tokens),), kv_dtype="f16"
    )
    case = replace(case, spec=replace(case.spec, kv_index=np.array([0, 0, 1, 1], np.int32)))
    whole = attend(case.spec, case)
    first, second = attention_halves(case)
    alone = attend(first.spec, first) + attend(second.spec, second)
    with Twin(native) as twin:
        data, pages = twin.hold(second.data), twin.pages(second.kv)
        keys, values = pages.keys[0], pages.values[0]
        beside = twin.start(lambda: twin.kernels.attention(second.spec, data, case.x, keys, values, case.batch))
        here = HostDevice(native).start(lambda: attend(first.spec, first))
        np.testing.assert_array_equal(sum(wait_all([here, beside])), alone)
        np.testing.assert_allclose(alone, whole, atol=1e-5)
        with pytest.raises(DeviceError, match="the caches must lie in the memory of twin"):
            twin.kernels.attention(second.spec, data, case.x, second.kv.keys[0], values, case.batch)


def attend(spec: AttentionSpec, case: AttentionCase) -> F32:
    return native.attention(spec, case.data, case.x, case.kv.keys[0], case.kv.values[0], case.batch)

"""The CUDA device keeps the interface of `tpi.devices.base.Device`: memory, copies, order, failures and closing."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from master.generation.engine import Engine
from tests.support.cluster.inprocess import in_process_deployment, in_process_engine
from tests.support.devices.cpu_backend import CpuBackend, CpuLane
from tests.support.devices.cuda_device import open_tested
from tests.support.devices.held import fetched, held
from tests.support.devices.offloading import answers, offloaded, weights_bytes
from tests.support.kernels.kernel_cases import ffn_case, reference
from tpi.devices.cuda.device import CudaDevice
from tpi.devices.options import OffloadOptions
from tpi.devices.pages import PAGE
from tpi.errors import DeviceError, DeviceFullError, KernelError
from tpi.kernels.reference import ReferenceKernels
from tpi.pack.reader import Pack

TOKENS = [3 + 7 * at % 200 for at in range(17)]  # a chunk of 16, and one more


def test_memory_has_a_limit_and_comes_zeroed() -> None:
    with closing(open_tested(limit=3 * PAGE)) as device:
        one, other = device.memory.allocate(PAGE + 1), device.memory.allocate(10)
        assert (one.shape, other.shape, device.memory.used) == ((PAGE + 1,), (10,), 3 * PAGE)
        assert one.ctypes.data % PAGE == other.ctypes.data % PAGE == 0
        assert not fetched(device, one).any()
        with pytest.raises(DeviceFullError, match=f"cuda.* may use {3 * PAGE} bytes .* needs {4 * PAGE}"):
            device.memory.allocate(1)
        device.memory.free(one)
        device.memory.free(device.memory.allocate(2 * PAGE))
        with pytest.raises(DeviceError, match="freed before"):
            device.memory.free(one)


def test_copies_in_out_and_within(device: CudaDevice) -> None:
    here = np.random.default_rng(1).integers(0, 256, 2 * PAGE).astype(np.uint8)
    here.flags.writeable = False  # as what is mapped from a file
    with held(device, np.zeros_like(here), np.zeros_like(here)) as (one, other):
        device.copy(here, one).wait()
        device.copy(one[: PAGE // 2], other[PAGE : PAGE + PAGE // 2]).wait()
        event = device.copy(other, back := device.staging(2 * PAGE))
        event.wait()
        assert event.done
        expected = np.zeros_like(here)
        expected[PAGE : PAGE + PAGE // 2] = here[: PAGE // 2]
        np.testing.assert_array_equal(back, expected)


def test_copies_that_cannot_be(device: CudaDevice) -> None:
    here = np.zeros(PAGE, np.uint8)
    with held(device, here) as (there,):
        for source, target, what in (
            (here, here.copy(), "one end of a copy"),
            (here[:5], there, "of one size"),
            (here[::2], there[: PAGE // 2], "contiguous"),
            (here[: PAGE // 2], there[::2], "contiguous"),
        ):
            with pytest.raises(DeviceError, match=what):
                device.copy(source, target)
        fixed = here.copy()
        fixed.flags.writeable = False
        with pytest.raises(DeviceError, match="writable memory"):
            device.copy(there, fixed)


def test_staging_is_zeroed_pages(device: CudaDevice) -> None:
    memory = device.staging(PAGE + 1)
    assert memory.dtype == np.uint8
    assert (memory.shape, memory.ctypes.data % PAGE) == ((2 * PAGE,), 0)
    assert not memory.any()
    memory.fill(7)
    with held(device, memory) as (there,):
        np.testing.assert_array_equal(fetched(device, there), memory)
    assert device.staging(0).size == 0


def test_calls_are_made_in_order_beside_the_caller(device: CudaDevice) -> None:
    go, made = Event(), []

    def first() -> str:
        assert go.wait(60)
        made.append("first")
        return "one"

    pending = device.start(first), device.start(lambda: made.append("second"))
    assert not pending[0].done
    assert not pending[1].done
    go.set()
    pending[1].wait()
    assert made == ["first", "second"]
    assert pending[0].wait() == "one"


def test_a_failure_surfaces_where_it_is_awaited(device: CudaDevice) -> None:
    case = ffn_case(np.random.default_rng(2), units=1)
    failing = device.start(lambda: device.kernels.ffn(case.spec, case.data, case.x))
    with held(device, case.data) as (data,):
        after = device.start(lambda: device.kernels.ffn(case.spec, data, case.x))
        for _ in range(2):
            with pytest.raises(DeviceError, match="weights must lie in the memory of cuda"):
                failing.wait()
        np.testing.assert_allclose(after.wait(), reference.ffn(case.spec, case.data, case.x), atol=1e-4)


def test_a_card_that_fails_is_named(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    case = ffn_case(np.random.default_rng(2), units=1)
    monkeypatch.setattr("tpi.devices.cuda.kernels.feed_forward", refuse)
    with held(device, case.data) as (data,):
        pending = device.start(lambda: device.kernels.ffn(case.spec, data, case.x))
        with pytest.raises(DeviceError, match=r"cuda.* failed: an illegal memory access"):
            pending.wait()


class StickyBackend(CpuBackend):
    """A backend whose calls all fail from some moment on, as a card's do after an error in a kernel."""

    broken = False

    def check(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")

    def zeros(self, size: int) -> Any:
        self.check()
        return super().zeros(size)

    def pin(self, address: int, size: int) -> Any:
        self.check()
        return super().pin(address, size)

    def lane(self) -> Any:
        return StickyLane(self)


class StickyLane(CpuLane):
    """A lane of a `StickyBackend`, and its marks."""

    def __init__(self, backend: StickyBackend) -> None:
        self._backend = backend

    @contextmanager
    def use(self) -> Iterator[None]:
        self._backend.check()
        with super().use():
            yield

    def mark(self) -> "StickyLane":
        self._backend.check()
        return self

    def wait(self) -> None:
        self._backend.check()


def test_a_sticky_error_is_raised_by_every_wait_and_not_by_close() -> None:
    backend = StickyBackend()
    device = CudaDevice(backend)
    case = ffn_case(np.random.default_rng(2), units=1)
    there, here = device.memory.allocate(case.data.size), device.staging(case.data.size)[: case.data.size]
    copied = device.copy(case.data, there)
    backend.broken = True
    begun = device.start(lambda: device.kernels.ffn(case.spec, there, case.x))
    failing: list[Callable[[], object]] = [copied.wait, begun.wait, device.copy(there, here).wait]
    failing.append(lambda: device.memory.allocate(PAGE))
    assert not device.staging(PAGE).any()
    for call in failing:
        with pytest.raises(
            DeviceError, match="failed: CUDA error: an illegal memory access was encountered;"
        ) as caught:
            call()
        assert "\n" not in str(caught.value)
    device.close()
    device.close()


@pytest.mark.parametrize("error", [OSError("no gcc"), AssertionError("no"), KeyError("sm_70"), MemoryError()])
def test_what_a_compiler_raises_is_a_device_error(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object) -> None:
        raise error

    case = ffn_case(np.random.default_rng(2), units=1)
    monkeypatch.setattr("tpi.devices.cuda.kernels.feed_forward", refuse)
    with held(device, case.data) as (data,), pytest.raises(DeviceError, match=r"failed: .*; give a smaller"):
        device.kernels.ffn(case.spec, data, case.x)


def test_calls_of_several_threads_agree(device: CudaDevice) -> None:
    case = ffn_case(np.random.default_rng(3), format="q4", units=1)
    with held(device, case.data) as (data,):
        beside = [device.start(lambda: device.kernels.ffn(case.spec, data, case.x)) for _ in range(2)]
        mine = device.kernels.ffn(case.spec, data, case.x)
        for each in beside:
            np.testing.assert_array_equal(each.wait(), mine)


def test_its_end_frees_all_and_comes_after_what_was_started() -> None:
    device = open_tested()
    there, done = device.memory.allocate(PAGE), []
    device.start(lambda: done.append(True))
    device.close()
    device.close()
    assert done == [True]
    with pytest.raises(DeviceError, match="or was freed"):
        device.copy(np.zeros(PAGE, np.uint8), there)
    with pytest.raises(RuntimeError):
        device.start(lambda: None)
    device.memory.free(there)
    assert device.memory.used == 0


def test_it_says_what_it_is(device: CudaDevice) -> None:
    device.kernels.set_threads(3)
    assert (device.kernels.isa(), device.kernels.threads()) == ("cuda", 1)


@pytest.mark.parametrize(
    ("family", "dtype", "allowed"), [("llama", "f32", 1e-4), ("gemma2", "q4", 2e-2), ("exaone4", "f32", 1e-4)]
)
def test_a_node_with_a_card_has_the_tokens_of_a_node_without(
    family: str, dtype: str, allowed: float, tiny_pack: Callable[..., Pack], tmp_path: Path, device: CudaDevice
) -> None:
    """Every block and the head are on the card. Logits differ only by the order of sums and the rounding to int8."""
    pack = tiny_pack(family, dtype)
    with in_process_engine(pack, [1], tmp_path / "without") as engine:
        expected = engine.logits(TOKENS)
    options = OffloadOptions("gpu", "gpu", "performance", 1)
    with offloaded(pack, tmp_path / "with", {0: device}, options, follow=1e-5) as deployment:
        assert device.memory.used > 0
        link = deployment.node.link
        assert link is not None
        assert link.offload.head_bytes > 0
        found = Engine(deployment).logits(TOKENS)
    assert np.abs(found - expected).max() < allowed * np.abs(expected).max()
    if dtype == "f32":
        np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))


def test_a_streamed_model_has_the_tokens_of_the_host(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    """The memory pipeline copies weights, keys and values for each block, and copies the new keys and values back."""
    pack, small, asked = tiny_pack("llama", "q4"), {"context": 32, "pool": 1}, [TOKENS[:2]]
    with closing(in_process_deployment(pack, [1], tmp_path / "host", **small)) as deployment:  # type: ignore[arg-type]
        expected = answers(deployment, asked, 2)
    options = OffloadOptions("ram", "ram", "memory", 1)
    with (
        closing(open_tested(weights_bytes(pack) // 2 + (1 << 20))) as card,
        offloaded(pack, tmp_path / "card", {0: card}, options, **small) as deployment,  # type: ignore[arg-type]
    ):
        assert answers(deployment, asked, 2) == expected
        link = deployment.node.link
        assert link is not None
        assert link.figures.weight_bytes > 0
        assert link.figures.kv_bytes > 0


def test_what_other_kernels_prepared_is_refused(device: CudaDevice) -> None:
    case = ffn_case(np.random.default_rng(4), units=1)
    with held(device, case.data) as (data,), pytest.raises(KernelError, match="other kernels"):
        device.kernels.ffn(case.spec, data, ReferenceKernels().prepare(case.spec, case.x))

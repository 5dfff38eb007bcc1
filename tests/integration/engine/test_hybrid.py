"""Feed-forward blocks that an accelerator and the CPU compute together, neuron by neuron, while neurons migrate."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace

import numpy as np
import pytest

from scheduler.neurons.arena import NeuronArena
from scheduler.neurons.layout import arena_layer
from scheduler.neurons.migration import STATIC, MigrationSettings
from scheduler.transfer.queue import TransferQueue
from tests.support.devices.opencl_device import assert_close, opencl_device
from tests.support.devices.shuffled import Shuffled
from tests.support.kernels.kernel_cases import ffn_case, native, normal, tolerance
from tpi.config import Format
from tpi.devices.base import Device
from tpi.devices.emulated.device import open_emulated
from tpi.devices.host import open_host
from tpi.kernels.spec import F32, I32, NO_TOKENS
from worker.neurons.hybrid import HybridFfn, NeuronChoice
from worker.node.microbatch import MicroBatch
from worker.node.order import COMPUTE
from worker.node.segment import Segment

HIDDEN, UNITS = 64, 10
NEURONS = 32 * UNITS
HOST = open_host()


def device_called(name: str) -> AbstractContextManager[Device]:
    if name == "opencl":
        return opencl_device()
    if name == "emulated":
        return closing(open_emulated("64MiB,link=2GB/s,stretch=1"))
    return closing(Shuffled(native, 3))


@contextmanager
def hybrid(
    device: Device, format: Format, biased: bool, moving: MigrationSettings, slots: int = 96
) -> Iterator[tuple[HybridFfn, np.ndarray, list[NeuronChoice | None]]]:
    """A block, its bytes, and a list whose last entry is the next choice of neurons."""
    random = np.random.default_rng(7)
    case = ffn_case(random, format=format, layout="record", hidden=HIDDEN, units=UNITS, activation="relu", bias=biased)
    spec = case.spec
    records = case.data.reshape(NEURONS, -1)
    hot = np.arange(slots, dtype=np.int32)
    layer = arena_layer("layer 0 ffn", records, np.linspace(0.9, 0.0, NEURONS), hot)
    chosen: list[NeuronChoice | None] = []
    with ExitStack() as stack:
        queue = stack.enter_context(closing(TransferQueue()))
        memory = device.memory.allocate(layer.nbytes)
        arena = NeuronArena(device, memory, [layer], queue, moving)
        stack.callback(arena.wait)
        yield HybridFfn(HOST, spec, device, device.start, arena.layers[0], lambda _: chosen[-1]), case.data, chosen


def run(block: HybridFfn, data: np.ndarray, x: F32) -> F32:
    def take(segment: Segment) -> F32:
        return x

    pending = block.start(COMPUTE, data, MicroBatch(x, NO_TOKENS), take)
    assert pending is not None
    return pending.wait()


def some(random: np.random.Generator) -> I32:
    return np.flatnonzero(random.random(NEURONS) < random.choice([0.0, 0.02, 0.3, 1.0])).astype(np.int32)


@pytest.mark.parametrize("name", ["emulated", "opencl", "shuffled"])
@pytest.mark.parametrize(("format", "biased"), [("f32", True), ("q8", False), ("q4", True), ("bf16", False)])
@pytest.mark.parametrize("moving", [STATIC, MigrationSettings()], ids=["static", "dynamic"])
def test_both_sides_come_to_what_the_cpu_computes_alone(
    name: str, format: Format, biased: bool, moving: MigrationSettings
) -> None:
    random = np.random.default_rng(11)
    with device_called(name) as device, hybrid(device, format, biased, moving) as (block, data, chosen):
        for step in range(25):
            active = some(random)
            block.arena.expect(some(random))
            chosen.append(NeuronChoice(active))
            x = normal(random, (1, 2, 3, 20)[step % 4], HIDDEN)
            assert_close(run(block, data, x), native.ffn(block.spec, data, x, active), tolerance(format))
        block.arena._arena.wait()  # on a busy machine no move may have ended yet
        figures = block.arena._arena.figures
        assert 0 < figures.active_on_accelerator < figures.active
        assert bool(figures.moved) == moving.migrate


def test_a_side_without_active_neurons_is_not_called() -> None:
    with device_called("emulated") as device, hybrid(device, "f32", False, STATIC) as (block, data, chosen):
        x, calls = normal(np.random.default_rng(0), 1, HIDDEN), []

        def counted(call: object) -> object:
            calls.append("accelerator")
            return device.start(call)  # type: ignore[arg-type]

        counting = replace(block, launch=counted)  # type: ignore[arg-type]
        for active, expected in (([], 0), ([200, 201], 0), ([3], 1), ([3, 200], 1)):
            calls.clear()
            chosen.append(NeuronChoice(np.array(active, np.int32)))
            assert_close(run(counting, data, x), native.ffn(block.spec, data, x, np.array(active, np.int32)), 5e-6)
            assert len(calls) == expected


def test_what_is_chosen_to_be_dense_is_the_hosts_alone() -> None:
    with device_called("emulated") as device, hybrid(device, "q4", True, STATIC) as (block, data, chosen):
        chosen.append(None)
        x = normal(np.random.default_rng(0), 4, HIDDEN)
        assert (run(block, data, x) == native.ffn(block.spec, data, x)).all()


def test_a_call_that_fails_gives_its_slots_back() -> None:
    with (
        device_called("emulated") as device,
        hybrid(device, "f32", False, MigrationSettings()) as (block, data, chosen),
    ):
        chosen.append(NeuronChoice(np.arange(40, dtype=np.int32)))
        broken = replace(block, spec=replace(block.spec, activation="none"))  # type: ignore[arg-type]
        with pytest.raises(Exception, match="none"):
            run(broken, data, normal(np.random.default_rng(0), 1, HIDDEN))
        assert not block.arena.table.pins.any()

"""A node with a second device: the same tokens, every byte where it is computed, and all of it given back."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from master.generation.engine import Engine
from tests.support.cluster.inprocess import in_process_deployment, in_process_engine
from tests.support.devices.twin import Twin
from tpi.devices.host import open_host
from tpi.errors import DeviceError, DeviceFullError, PlanError
from tpi.pack.reader import Pack
from worker.node.order import Order, phase_by_phase, plain
from worker.node.segment import AttentionSegment, FfnSegment

TOKENS = [3 + 7 * at % 200 for at in range(40)]
HALF = 0.5


@pytest.mark.parametrize("family", ["llama", "opt", "gemma2", "qwen3"])
@pytest.mark.parametrize("order", [plain, phase_by_phase])
def test_half_on_a_twin_is_bit_for_bit_two_nodes(
    family: str, order: Order, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    """Half of every block's heads and neurons: the order of sums is that of two nodes."""
    pack = tiny_pack(family)
    with in_process_engine(pack, [1, 1], tmp_path / "two") as engine:
        expected = engine.logits(TOKENS)
    with (
        Twin(open_host().kernels) as twin,
        closing(in_process_deployment(pack, [1], tmp_path / "one", others=[(twin, HALF)], order=order)) as deployment,
    ):
        np.testing.assert_array_equal(Engine(deployment).logits(TOKENS), expected)
        segments = [segment for block in deployment.node.loop.weights.now.blocks for segment in block]
        assert [segment.device.name for segment in segments] == ["twin", "host"] * (2 * pack.config.layers)
        for here, there in zip(segments[1::2], segments[0::2], strict=True):
            if isinstance(here, AttentionSegment):
                assert isinstance(there, AttentionSegment)
                assert here.spec.heads + there.spec.heads == pack.config.heads
            elif isinstance(here, FfnSegment):
                assert isinstance(there, FfnSegment)
                assert min(here.spec.neuron.units, there.spec.neuron.units) > 0


@pytest.mark.parametrize("dtype", ["q4", "q8"])
def test_a_twin_in_a_group_computes_quantised_weights(
    dtype: str, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    """Rank 0 of two has a twin: its block's input is rounded once, and the sums differ by rounding alone."""
    pack = tiny_pack("llama", dtype)
    with in_process_engine(pack, [1, 1], tmp_path / "two") as engine:
        expected = engine.logits(TOKENS)
    with (
        Twin(open_host().kernels) as twin,
        closing(in_process_deployment(pack, [1, 1], tmp_path / "one", others=[(twin, HALF)])) as deployment,
    ):
        found = Engine(deployment).logits(TOKENS)
    assert np.abs(found - expected).max() < 2e-2 * np.abs(expected).max()


def test_all_that_a_device_held_is_given_back(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    with Twin(open_host().kernels) as twin:
        with closing(in_process_deployment(tiny_pack("llama"), [1], tmp_path, others=[(twin, HALF)])):
            assert twin.memory.used > 0
        assert twin.memory.used == 0


def test_a_device_that_is_too_small_is_named_and_everything_is_closed(
    tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    with Twin(open_host().kernels, limit=1 << 16) as twin:
        with pytest.raises(DeviceFullError, match="twin"):
            in_process_deployment(tiny_pack("llama"), [1], tmp_path, others=[(twin, HALF)])
        assert twin.memory.used == 0


def test_the_twin_refuses_weights_that_are_not_its_own(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    with (
        Twin(open_host().kernels) as twin,
        closing(in_process_deployment(tiny_pack("llama"), [1], tmp_path, others=[(twin, HALF)])) as deployment,
    ):
        weights = deployment.node.loop.weights
        with weights.hold(1) as segments:
            (theirs, data), _ = list(segments)
        assert isinstance(theirs, FfnSegment)
        with pytest.raises(DeviceError, match="must lie in the memory of twin"):
            twin.kernels.ffn(theirs.spec, data.copy(), np.zeros((1, 96), np.float32))


def test_more_devices_than_units_are_refused(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    with Twin(open_host().kernels) as one, pytest.raises(PlanError, match="units"):
        in_process_deployment(tiny_pack("llama"), [1], tmp_path, others=[(one, 0.1)] * 9)

"""A node whose blocks are all computed by an OpenCL device gives the answers of the host."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from master.generation.engine import Engine
from tests.support.cluster.inprocess import in_process_engine
from tests.support.devices.offloading import offloaded, weights_bytes
from tests.support.devices.opencl_device import opencl_device
from tpi.devices.base import Device
from tpi.devices.options import OffloadOptions
from tpi.kernels.kv import KvDtype
from tpi.pack.reader import Pack

TOKENS = [3 + 7 * at % 200 for at in range(40)]


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with opencl_device() as opened:
        yield opened


def compared(
    pack: Pack, device: Device, cache: Path, kv: KvDtype | None, prompt: list[int]
) -> tuple[list[int], list[int], float]:
    """Return greedy tokens with and without the device, and the largest relative difference of their logits."""
    with in_process_engine(pack, [1], cache / "alone", kv=kv) as engine:
        expected = engine.logits(prompt)
    options = OffloadOptions("gpu", "gpu", "performance", 1)
    with offloaded(pack, cache / "card", {0: device}, options, kv=kv) as deployment:
        assert device.memory.used >= weights_bytes(pack)
        found = Engine(deployment).logits(prompt)
    difference = float(np.abs(found - expected).max() / np.abs(expected).max())
    return found.argmax(-1).tolist(), expected.argmax(-1).tolist(), difference


@pytest.mark.parametrize("family", ["llama", "opt", "gemma2", "qwen3", "olmo2", "exaone4", "hunyuan"])
def test_floats_are_equal_but_for_the_order_of_sums(
    family: str, device: Device, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    for prompt in (TOKENS, TOKENS[:3]):
        found, expected, difference = compared(tiny_pack(family), device, tmp_path, None, prompt)
        assert difference < 1e-4
        assert found == expected


@pytest.mark.parametrize("dtype", ["q4", "q8"])
def test_quantised_weights(dtype: str, device: Device, tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    """A value may round to the neighbouring int8 where norms differ in their last bit."""
    found, expected, difference = compared(tiny_pack("llama", dtype), device, tmp_path, "q8", TOKENS)
    assert difference < 2e-2
    assert found == expected

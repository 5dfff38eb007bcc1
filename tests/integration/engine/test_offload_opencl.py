"""A node that offloads to an OpenCL device, with real queues and events: the tokens of the host."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.offloading import answers, offloaded, prompts, weights_bytes
from tests.support.devices.opencl_device import opencl_device
from tests.support.kernels.pairwise import pairwise
from tpi.config import Format
from tpi.devices.base import shares_memory
from tpi.devices.opencl.card import OpenClCard
from tpi.devices.opencl.compute.chain import OpenClChain
from tpi.devices.options import KvPlace, OffloadOptions, Pipelining, Weights
from tpi.devices.pages import round_up
from tpi.kernels.kv import KvDtype
from tpi.pack.reader import Pack

KV_ROOM = 3 << 20  # bytes
FORMATS: list[Format] = ["f32", "q8", "q4"]
WEIGHTS: list[Weights] = ["auto", "gpu", "ram", "disk"]
KV: list[KvPlace] = ["auto", "gpu", "ram"]
PIPELINES: list[Pipelining] = ["auto", "performance", "memory"]
KV_FORMATS: list[KvDtype | None] = [None, "q8", "q4"]
CASES = pairwise(FORMATS, WEIGHTS, KV, PIPELINES, [1, 4, 32], [1, 8], KV_FORMATS)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_chips_share_of_host_memory_is_within_the_budget(
    weights: Weights, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    """PoCL's device, as an integrated chip, has no memory except the host's."""
    pack = tiny_pack("llama", "q8")
    with opencl_device() as device:
        if not shares_memory(device):
            pytest.skip("this device has memory of its own")
        options = OffloadOptions(weights, pipeline="performance")
        small: dict[str, Any] = {"context": 64, "pool": 8, "memory": 12 << 20}
        with offloaded(pack, tmp_path, {0: device}, options, shared=True, **small) as deployment:
            answers(deployment, prompts(pack.config.vocab, 1, seed=1))
            node = deployment.node
            assert node.offload is not None
            assert device.used + node.budget.used - node.offload.shared_bytes <= 12 << 20
            assert node.budget.used <= 12 << 20
            assert weights != "gpu" or device.memory.used >= weights_bytes(pack)


def test_a_ring_is_of_buffers_that_the_driver_gives(
    tiny_pack: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some drivers limit an allocation to a quarter of the card; here the limit is the largest block."""
    pack = tiny_pack("llama", "q8")
    asked = prompts(pack.config.vocab, 2, seed=3)
    small: dict[str, Any] = {"context": 64, "pool": 8}
    with closing(in_process_deployment(pack, [1], tmp_path / "host", **small)) as deployment:
        expected = answers(deployment, asked)
        largest = max(round_up(block.nbytes) for block in deployment.node._residence.segments)
    monkeypatch.setattr(OpenClCard, "largest", lambda card: largest)
    with (
        opencl_device() as device,
        offloaded(pack, tmp_path / "card", {0: device}, OffloadOptions("ram", crossover=1), **small) as deployment,
    ):
        offload = deployment.node.offload
        assert offload is not None
        assert offload.ring_bytes(1) > largest
        assert answers(deployment, asked) == expected


@pytest.mark.parametrize(
    ("family", "dtype", "batch"), [("llama", "f32", 3), ("gemma2", "q4", 1), ("exaone4", "f32", 2), ("qwen3", "q8", 8)]
)
def test_a_chain_and_the_head_on_the_device_answer_as_the_host_does(
    family: str, dtype: str, batch: int, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    """Hidden states stay on the device from the first block to the head, in steps of one and of several requests."""
    pack = tiny_pack(family, dtype)
    asked = prompts(pack.config.vocab, batch, seed=6)
    small: dict[str, Any] = {"context": 64, "pool": 16}
    with closing(in_process_deployment(pack, [1], tmp_path / "host", **small)) as deployment:
        expected = answers(deployment, asked)
    options = OffloadOptions("gpu", "gpu", "performance", 1)
    with (
        opencl_device() as device,
        offloaded(pack, tmp_path / "card", {0: device}, options, follow=1e-5, **small) as deployment,
    ):
        assert answers(deployment, asked) == expected
        assert [type(chain) for chain in deployment.node.loop._chains.values()] == [OpenClChain]
        assert deployment.node.offload is not None
        assert shares_memory(device) or deployment.node.offload.head_bytes > 0


@pytest.mark.parametrize(("dtype", "weights", "kv", "pipeline", "batch", "crossover", "kv_dtype"), CASES)
def test_every_placement_and_pipeline_answers_as_the_host_does(
    dtype: Format,
    weights: Weights,
    kv: KvPlace,
    pipeline: Pipelining,
    batch: int,
    crossover: int,
    kv_dtype: KvDtype | None,
    tiny_pack: Callable[..., Pack],
    tmp_path: Path,
) -> None:
    """Weights are resident, or streamed from memory or disk, also in batches. Some runs quantise keys and values."""
    pack = tiny_pack("llama", dtype)
    share = 1.5 if weights == "gpu" else 0.6
    options = OffloadOptions(weights, kv, pipeline, crossover)
    small: dict[str, Any] = {"context": 64, "pool": 96, "kv": kv_dtype}
    asked = prompts(pack.config.vocab, batch, seed=batch + 1)
    with closing(in_process_deployment(pack, [1], tmp_path / "host", **small)) as deployment:
        expected = answers(deployment, asked)
    with (
        opencl_device(int(share * weights_bytes(pack)) + KV_ROOM) as device,
        offloaded(pack, tmp_path / "card", {0: device}, options, **small) as deployment,
    ):
        assert device.memory.used > 0
        assert answers(deployment, asked) == expected

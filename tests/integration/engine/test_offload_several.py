"""A node with several accelerators: the tokens of the host, each device within its memory, every link in use."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.offloading import answers, offloaded, prompts, weights_bytes
from tests.support.devices.opencl_device import opencl_device
from tests.support.kernels.pairwise import pairwise
from tpi.devices.base import Device
from tpi.devices.choose import open_devices
from tpi.devices.options import KvPlace, OffloadOptions, Pipelining, Weights
from tpi.errors import PlanError
from tpi.pack.reader import Pack

BESIDE = 4 << 20  # bytes of each card for pages and activations
SMALL: dict[str, Any] = {"context": 64, "pool": 96}  # tokens, pages
WEIGHTS: list[Weights] = ["auto", "gpu", "ram", "disk"]
KV: list[KvPlace] = ["auto", "gpu", "ram"]
PIPELINES: list[Pipelining] = ["auto", "performance", "memory"]
CASES = pairwise(WEIGHTS, KV, PIPELINES, [1, 4, 32], [1, 8, None])


@pytest.mark.parametrize(("weights", "kv", "pipeline", "batch", "crossover"), CASES)
def test_two_cards_of_different_sizes_answer_as_the_host_does(
    weights: Weights,
    kv: KvPlace,
    pipeline: Pipelining,
    batch: int,
    crossover: int | None,
    tiny_pack: Callable[..., Pack],
    tmp_path: Path,
) -> None:
    """Each card takes at most its limit, and as much as predicted."""
    pack = tiny_pack("llama")
    asked = prompts(pack.config.vocab, batch, seed=batch)
    options = OffloadOptions(weights, kv, pipeline, crossover)
    with (
        cards(pack, *((0.9, 0.7) if weights == "gpu" else (0.35, 0.2))) as devices,
        offloaded(pack, tmp_path / "offloaded", {0: devices}, options, **SMALL) as deployment,
    ):
        assert answers(deployment, asked) == on_the_host(pack, tmp_path, asked)
        plan = deployment.node.offload
        assert plan is not None
        for device, predicted in zip(devices, [*plan.card_bytes, 0], strict=False):
            assert device.memory.used <= predicted <= 1.1 * device.memory.used


@pytest.mark.parametrize("dtype", ["q8", "q4"])
@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_what_streams_comes_over_both_links(
    dtype: str, tier: Weights, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    """Weights on disk are read in the order of use, whichever card they go to."""
    pack = tiny_pack("llama", dtype)
    asked = prompts(pack.config.vocab, 4, seed=7)
    options = OffloadOptions(tier, "ram", "performance", 1)
    with (
        cards(pack, 0.3, 0.3) as devices,
        offloaded(pack, tmp_path / "offloaded", {0: devices}, options, **SMALL) as deployment,
    ):
        assert answers(deployment, asked) == on_the_host(pack, tmp_path, asked)
        plan, link = deployment.node.offload, deployment.node.link
        assert plan is not None
        assert link is not None
        assert all(plan.pieces_on(card) & plan.long for card in (1, 2))
        assert link.figures.weight_bytes >= weights_bytes(pack)
        assert link.figures.kv_bytes > 0
        assert "emu holds 0, emu-2 holds 0 of" in link.describe()


def test_three_cards_keep_what_none_holds_alone(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    pack = tiny_pack("llama")
    asked = prompts(pack.config.vocab, 4, seed=3)
    options = OffloadOptions("gpu", "gpu", "performance")
    with (
        cards(pack, 0.4, 0.4, 0.4, beside=1 << 20) as devices,
        offloaded(pack, tmp_path / "offloaded", {0: devices}, options, context=64, pool=16) as deployment,
    ):
        assert answers(deployment, asked) == on_the_host(pack, tmp_path, asked)
        assert all(device.memory.used > 0 for device in devices)
        assert deployment.node.offload is not None
        assert not deployment.node.offload.host_pieces


def test_too_much_for_all_cards_is_refused_with_a_working_size(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    pack = tiny_pack("llama")
    with cards(pack, 0.3, 0.2, beside=0) as devices:
        with (
            pytest.raises(PlanError, match=r"GPU memory of .* and \d+KiB is too little .* --gpu-memory \d+MiB would"),
            offloaded(pack, tmp_path, {0: devices}, OffloadOptions("gpu"), **SMALL),
        ):
            pytest.fail("it was deployed")
        assert not any(device.memory.used for device in devices)


@pytest.mark.parametrize(("weights", "kv"), list(product(["gpu", "ram", "disk"], ["gpu", "ram"])))
def test_two_opencl_devices_answer_as_the_host_does(
    weights: Weights, kv: KvPlace, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    """Real queues and events; one chip is opened twice."""
    pack = tiny_pack("llama")
    asked = prompts(pack.config.vocab, 2, seed=2, longest=20)
    sizes = [int(share * weights_bytes(pack)) + BESIDE for share in ((0.9, 0.7) if weights == "gpu" else (0.3, 0.3))]
    with (
        opencl_device(sizes[0]) as one,
        opencl_device(sizes[1]) as other,
        offloaded(
            pack, tmp_path / "cards", {0: [one, other]}, OffloadOptions(weights, kv, "auto", 1), **SMALL
        ) as there,
    ):
        assert answers(there, asked) == on_the_host(pack, tmp_path, asked)


@contextmanager
def cards(pack: Pack, *shares: float, beside: int = BESIDE) -> Iterator[list[Device]]:
    """Return emulated accelerators of one node, each with room for a share of the weights and some more bytes."""
    sizes = [int(share * weights_bytes(pack)) + beside for share in shares]
    with ExitStack() as stack:
        found = open_devices([("emu:1GiB", size) for size in sizes])
        for device in found:
            stack.enter_context(closing(device))
        yield list(found)


def on_the_host(pack: Pack, cache: Path, asked: list[list[int]]) -> list[list[int]]:
    with closing(in_process_deployment(pack, [1], cache / "host", **SMALL)) as deployment:
        return answers(deployment, asked)

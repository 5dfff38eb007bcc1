"""A node whose accelerator holds some or none of its weights: the same tokens, within its memory, all memory freed."""

import errno
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from master.generation.engine import Engine
from master.vocabulary.sampler import Sampler, Sampling
from scheduler.model.machine import LAPTOP, laptop_gpu
from scheduler.storage.disk import DirectDisk
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.offloading import answers, offloaded, prompts, weights_bytes
from tests.support.devices.twin import Twin
from tests.support.generating import generate
from tests.support.kernels.pairwise import pairwise
from tpi.devices.base import Event
from tpi.devices.choose import open_device
from tpi.devices.host import open_host
from tpi.devices.options import KvPlace, OffloadOptions, Pipelining, Weights
from tpi.devices.pages import PAGE, Bytes
from tpi.errors import DeviceError, PlanError, WeightsError
from tpi.kernels import Kernels
from tpi.kernels.kv import KvDtype
from tpi.pack.reader import Pack
from worker.equipment import AcceleratorSetup

WEIGHTS: list[Weights] = ["auto", "gpu", "ram", "disk"]
KV: list[KvPlace] = ["auto", "gpu", "ram"]
PIPELINES: list[Pipelining] = ["auto", "performance", "memory"]
PLACEMENTS = pairwise(WEIGHTS, KV, PIPELINES, [1, 4, 32], [1, 8, None])
BESIDE = 4 << 20  # bytes
SMALL: dict[str, Any] = {"context": 64, "pool": 96}  # tokens, pages


@pytest.mark.parametrize(("weights", "kv", "pipeline", "batch", "crossover"), PLACEMENTS)
def test_every_placement_answers_as_the_host_does(
    weights: Weights,
    kv: KvPlace,
    pipeline: Pipelining,
    batch: int,
    crossover: int | None,
    tiny_pack: Callable[..., Pack],
    tmp_path: Path,
) -> None:
    """Weights are resident, or streamed from memory or disk, also in batches.

    The accelerator computes always, or if that is faster.
    """
    pack = tiny_pack("llama")
    asked = prompts(pack.config.vocab, batch, seed=batch)
    expected = on_the_host(pack, tmp_path, asked)
    options = OffloadOptions(weights, kv, pipeline, crossover)
    with (
        closing(open_device("emu:1GiB", room(pack, 1.5 if weights == "gpu" else 0.6))) as device,
        offloaded(pack, tmp_path / "offloaded", {0: device}, options, **SMALL) as deployment,
    ):
        assert answers(deployment, asked) == expected
        plan = deployment.node.offload
        assert plan is not None
        # appendix B, for what is allocated
        assert device.memory.used <= plan.memory_bytes <= 1.1 * device.memory.used


@pytest.mark.parametrize(
    ("kv_dtype", "weights", "kv", "pipeline", "batch"),
    pairwise(["q8", "q4"], WEIGHTS, ["gpu", "ram"], ["performance", "memory"], [1, 4]),
)
def test_keys_and_values_of_few_bits_live_there_or_visit(
    kv_dtype: KvDtype,
    weights: Weights,
    kv: KvPlace,
    pipeline: Pipelining,
    batch: int,
    tiny_pack: Callable[..., Pack],
    tmp_path: Path,
) -> None:
    """Pages of keys and values are not whole pages of memory in these formats."""
    pack, small = tiny_pack("llama"), SMALL | {"kv": kv_dtype}
    asked = prompts(pack.config.vocab, batch, seed=batch)
    with closing(in_process_deployment(pack, [1], tmp_path / "host", **small)) as deployment:
        expected = answers(deployment, asked)
    options = OffloadOptions(weights, kv, pipeline, 1)
    with (
        closing(open_device("emu:1GiB", room(pack, 1.5 if weights == "gpu" else 0.6))) as device,
        offloaded(pack, tmp_path / "offloaded", {0: device}, options, **small) as deployment,
    ):
        assert answers(deployment, asked) == expected
        plan = deployment.node.offload
        assert plan is not None
        assert device.memory.used <= plan.memory_bytes <= 1.1 * device.memory.used


@pytest.mark.parametrize("dtype", ["f32", "q8", "q4"])
@pytest.mark.parametrize("pipeline", ["performance", "memory"])
def test_three_nodes_with_devices_answer_as_three_without(
    dtype: str, pipeline: Pipelining, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    """An emulated card that streams, a twin that holds all weights, and a node without a device."""
    pack, shares = tiny_pack("llama", dtype), (2, 1, 1)
    asked = prompts(pack.config.vocab, 4, seed=3)
    expected = on_the_host(pack, tmp_path, asked, shares)
    options = OffloadOptions("auto", "auto", pipeline, 1)
    with (
        closing(open_device("emu:1GiB", room(pack, 0.3))) as emulated,
        Twin(open_host().kernels, room(pack, 2)) as twin,
        offloaded(pack, tmp_path / "offloaded", {0: emulated, 2: twin}, options, shares, **SMALL) as deployment,
    ):
        assert answers(deployment, asked) == expected
        assert min(emulated.memory.used, twin.memory.used) > 0


@pytest.mark.parametrize(
    ("weights", "kv", "pipeline", "batch"),
    [
        ("ram", "gpu", "performance", 32),
        ("ram", "ram", "memory", 1),
        ("disk", "ram", "performance", 1),
        ("disk", "gpu", "memory", 32),
        ("gpu", "ram", "auto", 32),
        ("gpu", "gpu", "auto", 1),
    ],
)
def test_three_nodes_with_given_places_answer_as_three_without(
    weights: Weights, kv: KvPlace, pipeline: Pipelining, batch: int, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    pack, shares = tiny_pack("llama"), (2, 1, 1)
    asked = prompts(pack.config.vocab, batch, seed=batch)
    expected = on_the_host(pack, tmp_path, asked, shares)
    options = OffloadOptions(weights, kv, pipeline, 1)
    with (
        closing(open_device("emu:1GiB", room(pack, 0.9 if weights == "gpu" else 0.3))) as emulated,
        Twin(open_host().kernels, room(pack, 2)) as twin,
        offloaded(pack, tmp_path / "offloaded", {0: emulated, 2: twin}, options, shares, **SMALL) as deployment,
    ):
        assert answers(deployment, asked) == expected
        assert min(emulated.memory.used, twin.memory.used) > 0


@pytest.mark.parametrize("family", ["opt", "gemma2", "qwen3"])
def test_other_families_stream_too(family: str, tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    """Families with biases, and with norms after a block or of heads. These belong to a block, not to its segments."""
    pack = tiny_pack(family)
    asked = prompts(pack.config.vocab, 4, seed=5)
    expected = on_the_host(pack, tmp_path, asked)
    options = OffloadOptions("ram", "ram", "performance", 4)
    with (
        Twin(open_host().kernels, room(pack, 5)) as twin,
        offloaded(pack, tmp_path / "offloaded", {0: twin}, options, **SMALL) as deployment,
    ):
        assert answers(deployment, asked) == expected


def test_prompts_run_on_the_card_and_tokens_at_the_weights(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    pack = tiny_pack("llama")
    options = OffloadOptions("ram", "ram", "performance", 8)
    with (
        Twin(open_host().kernels, room(pack, 0.6)) as twin,
        offloaded(pack, tmp_path, {0: twin}, options, **SMALL) as deployment,
    ):
        engine, link = Engine(deployment), deployment.node.link
        assert link is not None
        engine.logits(range(3, 23))  # two steps, of 16 tokens and of 4
        moved = link.figures
        assert moved.weight_bytes >= weights_bytes(pack)
        assert moved.kv_bytes > 0
        engine.logits(range(3, 8))
        assert link.figures.kv_bytes == moved.kv_bytes
        assert deployment.node.loop.weights.now.kept is not None  # in one call of the chain


@pytest.mark.parametrize("damaged", ["weight load", "kv load"])
def test_a_copy_that_fails_is_named_and_the_next_step_goes_on(
    damaged: str, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    pack, failing = tiny_pack("llama"), [False]
    asked = [list(range(3, 30))]
    expected = on_the_host(pack, tmp_path, asked)
    options = OffloadOptions("ram" if damaged == "weight load" else "gpu", "ram", "memory", 1)
    with (
        Fragile(open_host().kernels, room(pack, 2), failing) as device,
        offloaded(pack, tmp_path / "offloaded", {0: device}, options, **SMALL) as deployment,
    ):
        engine = Engine(deployment)
        sequence = engine.admit(asked[0])
        if damaged == "kv load":
            next(generate(engine, sequence, Sampler(Sampling(temperature=0)), 1))
            assert deployment.node.link is not None
            deployment.node.link.wait_idle()  # what was appended is at home
        failing[0] = True
        with pytest.raises(DeviceError, match="the card fell off the bus"):
            next(generate(engine, sequence, Sampler(Sampling(temperature=0)), 1))
        failing[0] = False
        assert answers(deployment, asked) == expected


@pytest.mark.parametrize("pipeline", ["performance", "memory"])
def test_the_first_request_after_a_disk_recovered_is_answered(
    pipeline: Pipelining, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    """Blocks that failed to load ahead, while nothing waited for them, are read again."""
    pack, asked = tiny_pack("llama"), [list(range(3, 30))]
    expected = on_the_host(pack, tmp_path, asked)
    disk, options = FailingDisk(), OffloadOptions("disk", "ram", pipeline, 1)
    with (
        closing(open_device("emu:1GiB", room(pack, 0.6))) as device,
        offloaded(pack, tmp_path / "offloaded", {0: device}, options, disk=disk, **SMALL) as deployment,
    ):
        assert answers(deployment, asked) == expected
        disk.broken = True
        for _ in range(2):
            with pytest.raises(WeightsError, match=r"\.safetensors could not be read: Input/output error"):
                answers(deployment, asked)
        disk.broken = False
        assert answers(deployment, asked) == expected


def test_keys_and_values_whose_save_failed_are_not_used_again(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    """Their step ended before the failure was noticed, so no later step may use them."""
    pack, failing = tiny_pack("llama"), [False]
    options = OffloadOptions("gpu", "ram", "performance", 1)
    device = Fragile(open_host().kernels, room(pack, 2), failing)
    with device, offloaded(pack, tmp_path, {0: device}, options, **SMALL) as deployment:
        engine = Engine(deployment)
        failing[0] = True
        engine.logits(range(3, 9))
        assert device.failed.wait(60)  # saves begin in threads of their own, perhaps after the step
        failing[0] = False
        for _ in range(3):
            with pytest.raises(DeviceError, match="the card fell off the bus"):
                engine.logits(range(3, 40))


def test_a_segment_below_the_fast_piece_size_is_one_copy(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    """Read pages one by one: a segment that is smaller than a piece is still copied at once."""
    pack, copied = tiny_pack("llama"), list[int]()
    link = replace(laptop_gpu().link, piece=1 << 26)
    figures = replace(LAPTOP, accelerator=replace(laptop_gpu(), link=link))
    with Counting(open_host().kernels, room(pack, 0.6), copied) as device:
        beside = AcceleratorSetup(device, figures, OffloadOptions("disk", "gpu", "performance", 1))
        disk = DirectDisk(PAGE, 1)
        with closing(
            in_process_deployment(pack, [1], tmp_path, accelerators={0: beside}, disk=disk, **SMALL)
        ) as deployment:
            Engine(deployment).logits(range(3, 8))
            plan = deployment.node.offload
            assert plan is not None
            segments = {piece.nbytes for piece in plan.pieces}
            assert max(segments) > 4 * PAGE
            assert set(copied) == segments


@pytest.mark.parametrize(
    ("options", "limit", "way_out"),
    [
        (OffloadOptions(weights="gpu"), 0.5, r"--gpu-memory \d+MiB would do"),
        (OffloadOptions(kv="gpu", crossover=1), 0.1, r"--gpu-memory \d+MiB would do"),
    ],
)
def test_what_fits_nowhere_is_refused_with_what_would_do(
    options: OffloadOptions, limit: float, way_out: str, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    pack = tiny_pack("llama")
    with Twin(open_host().kernels, int(limit * weights_bytes(pack))) as twin:
        with pytest.raises(PlanError, match=way_out), offloaded(pack, tmp_path, {0: twin}, options, **SMALL):
            pytest.fail("it was deployed")
        assert twin.memory.used == 0


class Counting(Twin):
    """A device that records the bytes of each copy."""

    def __init__(self, kernels: Kernels, limit: int, copied: list[int]) -> None:
        super().__init__(kernels, limit)
        self._copied = copied

    def copy(self, source: Bytes, target: Bytes) -> Event:
        self._copied.append(source.size)
        return super().copy(source, target)


class FailingDisk(DirectDisk):
    """A disk that fails while `broken` is set."""

    broken = False

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        if self.broken:
            raise OSError(errno.EIO, "Input/output error")
        return super().read(path, offset, into)


class Fragile(Twin):
    """A device whose copies fail on request."""

    def __init__(self, kernels: Kernels, limit: int, failing: list[bool]) -> None:
        super().__init__(kernels, limit)
        self._broken = failing
        self.failed = threading.Event()

    def copy(self, source: Bytes, target: Bytes) -> Event:
        if self._broken[0]:
            self.failed.set()
            raise DeviceError("the card fell off the bus")
        return super().copy(source, target)


def on_the_host(pack: Pack, cache: Path, asked: list[list[int]], shares: tuple[int, ...] = (1,)) -> list[list[int]]:
    with closing(in_process_deployment(pack, shares, cache / "host", **SMALL)) as deployment:
        return answers(deployment, asked)


def room(pack: Pack, share: float) -> int:
    """Return the bytes for a share of the weights, and for pages and activations."""
    return int(share * weights_bytes(pack)) + BESIDE

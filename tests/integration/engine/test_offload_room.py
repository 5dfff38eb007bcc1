"""The memory of an accelerator in a run: within the limit, as `tpi plan` predicts, and as little as possible."""

import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from master.deployment.deployment import Deployment
from master.generation.engine import Engine
from master.generation.request import Request
from master.planning.node import PlannedNode
from master.planning.problem import planning_case, request_of
from master.planning.report import PlanReport
from master.planning.shapes import model_shape
from master.vocabulary.sampler import Sampler, Sampling
from scheduler.model.machine import LAPTOP, laptop_gpu
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.offloading import answers, offloaded
from tests.support.devices.opencl_device import opencl_device
from tests.support.weights.shapes import LLAMA_1B, write_huggingface
from tpi.devices.choose import open_device
from tpi.devices.opencl.device import OpenClDevice
from tpi.devices.options import KvPlace, OffloadOptions, Pipelining, Weights
from tpi.errors import PlanError
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack

MIB = 1 << 20
CONTEXT = 256  # tokens
PROMPT = [5 + at % 200 for at in range(90)]
SHAPE = LLAMA_1B | {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": CONTEXT,
}  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pack]:
    """Return a pack in a format, of a model whose blocks are larger than pages of memory."""
    directory = write_huggingface(tmp_path_factory.mktemp("model"), SHAPE)

    def get(dtype: str) -> Pack:
        target = tmp_path_factory.mktemp("pack") / dtype
        pack_model(open_source(directory), dtype, target)
        return Pack.open(target)

    return get


@pytest.mark.parametrize(
    ("dtype", "limit", "weights", "kv", "pipeline", "follow"),
    [
        ("q4", 2 * MIB, "ram", "ram", "memory", None),
        ("q4", 3 * MIB, "auto", "auto", "performance", None),
        ("q8", 6 * MIB, "gpu", "gpu", "auto", None),
        ("q8", 6 * MIB, "gpu", "gpu", "auto", 1e-5),
    ],
)
def test_memory_use_is_within_the_limit_and_as_planned(
    dtype: str, limit: int, weights: Weights, kv: KvPlace, pipeline: Pipelining, follow: float | None,
    packed: Callable[[str], Pack], tmp_path: Path,
) -> None:  # fmt: skip
    """With `follow`, the device computes a chain, and the head."""
    pack, options = packed(dtype), OffloadOptions(weights, kv, pipeline, 1)
    with (
        opencl_device(limit) as device,
        offloaded(
            pack, tmp_path, {0: device}, options, follow=follow, chunk=512, context=CONTEXT, pool=8
        ) as deployment,
    ):
        most = most_used(device, Engine(deployment))
        assert most <= limit
        assert planned(pack, limit, options, follow) == pytest.approx(most, rel=0.1)


def most_used(device: OpenClDevice, engine: Engine) -> int:
    """Return the most bytes of the device's memory in use while it answers."""
    sequence, most = engine.admit(PROMPT), 0
    engine.submit(Request(sequence, Sampler(Sampling(temperature=0)), 2, lambda _: True))
    while engine.requests:
        engine.step()
        most = max(most, device.used)
    engine.release(sequence)
    return most


def planned(pack: Pack, limit: int, options: OffloadOptions, follow: float | None) -> int:
    """Return the accelerator's memory as `tpi plan` predicts it."""
    shape = model_shape(str(pack.path), "auto", pack.path, 1 << 33)
    machine = replace(LAPTOP, accelerator=replace(laptop_gpu(), memory=limit, follow=follow))
    request = request_of(shape.config, None, None, 1, CONTEXT)
    case = planning_case(shape, machine, request, options)
    return PlanReport.of(shape, PlannedNode(machine, "as a laptop"), case).peaks.accelerator.total


@pytest.mark.parametrize(
    ("weights", "kv", "pipeline", "crossover", "most"),
    [
        ("gpu", "auto", "auto", None, 4),
        ("ram", "gpu", "memory", 1, 2),
        ("disk", "ram", "performance", 1, 2),
        ("ram", "ram", "memory", 1, 2),
    ],
)
def test_the_size_a_refusal_names_is_the_least_that_works(
    weights: Weights, kv: KvPlace, pipeline: Pipelining, crossover: int | None, most: int,
    packed: Callable[[str], Pack], tmp_path: Path,
) -> None:  # fmt: skip
    """The largest block takes 0.84 MB, a layer's pages 0.13 MB, and buffers of kernels for few tokens 0.1 MB."""
    pack, options = packed("q8"), OffloadOptions(weights, kv, pipeline, crossover)
    asked = [PROMPT[:20]]
    with closing(in_process_deployment(pack, [1], tmp_path / "host", context=CONTEXT, pool=8)) as deployment:
        expected = answers(deployment, asked, 2)
    with pytest.raises(PlanError, match="would do") as refused, run(pack, tmp_path, MIB // 4, options):
        pytest.fail("it was deployed")
    least = int(re.findall(r"--gpu-memory (\d+)MiB would do", str(refused.value))[0])
    assert least == most
    with run(pack, tmp_path, least * MIB, options) as deployment:
        assert answers(deployment, asked, 2) == expected
    with (
        pytest.raises(PlanError, match=f"--gpu-memory {least}MiB would do"),
        run(pack, tmp_path, (least - 1) * MIB, options),
    ):
        pytest.fail("it was deployed")


@contextmanager
def run(pack: Pack, cache: Path, room: int, options: OffloadOptions) -> Iterator[Deployment]:
    """Run a node with an emulated accelerator that has a number of bytes."""
    with (
        closing(open_device(f"emu:{room}B")) as device,
        offloaded(pack, cache / str(room), {0: device}, options, context=CONTEXT, pool=8, chunk=64) as deployment,
    ):
        yield deployment

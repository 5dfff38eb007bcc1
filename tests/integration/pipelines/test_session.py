"""A session that batches, as `tpi batch` opens it; and the pipeline on an OpenCL device."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from master.options import RunOptions
from master.session import Session
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.offloading import answers, batched, offloaded, prompts, weights_bytes
from tests.support.devices.opencl_device import opencl_device
from tpi.devices.options import DeviceOptions, OffloadOptions
from tpi.pack.reader import Pack
from worker.pipelines.accelerated import BatchAccelerated

BATCH = 24
CONTEXT = 64


def test_a_session_runs_a_batch_in_micro_batches(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    pack = tiny_pack("mixtral", "q8")
    asked = prompts(pack.config.vocab, BATCH, seed=8, longest=20)
    with Session(RunOptions(str(pack.path), context=CONTEXT, parallel=BATCH, cache=tmp_path)) as session:
        expected = answers(session.engine.deployment, asked, 3)
    devices = DeviceOptions(("emu:1GiB,stretch=1",), (3 << 20,), OffloadOptions("ram", "ram", "batch"))
    options = RunOptions(str(pack.path), context=CONTEXT, parallel=BATCH, devices=devices, cache=tmp_path)
    with Session(options) as session:
        link = session.node.link
        assert isinstance(link, BatchAccelerated)
        assert link.settings.policy.batch == BATCH
        batched(session.engine.deployment, 5)
        assert answers(session.engine.deployment, asked, 3) == expected
        assert f"batches of {BATCH} in micro-batches of" in link.describe()


@pytest.mark.parametrize(
    ("family", "dtype", "kv"), [("llama", "q4", "ram"), ("mixtral", "f32", "ram"), ("llama", "f32", "gpu")]
)
def test_batches_on_opencl(family: str, dtype: str, kv: str, tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    """Real queues and events give the tokens of the host."""
    pack = tiny_pack(family, dtype)
    small = {"context": CONTEXT, "pool": 48}
    asked = prompts(pack.config.vocab, 9, seed=2)
    with closing(in_process_deployment(pack, [1], tmp_path / "host", **small)) as deployment:  # type: ignore[arg-type]
        expected = answers(deployment, asked)
    options = OffloadOptions("ram", kv, "batch")  # type: ignore[arg-type]
    with (
        opencl_device(int(0.8 * weights_bytes(pack)) + (6 << 20)) as device,
        offloaded(pack, tmp_path / "batch", {0: device}, options, **small) as deployment,  # type: ignore[arg-type]
    ):
        batched(deployment)
        assert answers(deployment, asked) == expected


@pytest.mark.parametrize(
    ("many", "host", "batches"), [(True, "0.001", True), (False, "0.001", False), (True, "1", False)]
)
def test_auto_batches_where_many_wait_and_the_accelerator_pays(
    many: bool, host: str, batches: bool, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    """The cost model of `tpi plan --batch` decides; if the CPU is faster than the card, no batch is planned."""
    pack = tiny_pack("llama")
    offload = OffloadOptions(weights="ram", kv="ram", unattended=many)
    devices = DeviceOptions((f"emu:1GiB,stretch=1,launch=1ns,latency=1ns,host={host}",), (6 << 20,), offload)
    with Session(RunOptions(str(pack.path), context=CONTEXT, parallel=16, devices=devices, cache=tmp_path)) as session:
        assert isinstance(session.node.link, BatchAccelerated) == batches

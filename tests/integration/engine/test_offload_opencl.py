"""A node that offloads to an OpenCL device, with real queues and events: the tokens of the host alone."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.offloading import answers, offloaded, prompts, weights_bytes
from tests.support.devices.opencl_device import opencl_device
from tpi.devices.options import OffloadOptions
from tpi.pack.reader import Pack

KV_ROOM = 3 << 20  # bytes
FORMS = [
    ("gpu", "gpu", "performance"),
    ("ram", "ram", "performance"),
    ("ram", "gpu", "memory"),
    ("disk", "ram", "memory"),
    ("disk", "gpu", "performance"),
    ("auto", "auto", "auto"),
]


@pytest.mark.parametrize(
    ("dtype", "weights", "kv", "pipeline"), [*(("f32", *form) for form in FORMS), ("q4", *FORMS[2]), ("q8", *FORMS[4])]
)
def test_every_placement_and_pipeline_answers_as_the_host_does(
    dtype: str, weights: str, kv: str, pipeline: str, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    pack = tiny_pack("llama", dtype)
    share = 1.5 if weights == "gpu" else 0.6
    options = OffloadOptions(weights, kv, pipeline, 1)  # type: ignore[arg-type]
    for batch in (1, 4, 32) if dtype == "f32" else (4,):
        asked = prompts(pack.config.vocab, batch, seed=batch)
        with closing(in_process_deployment(pack, [1], tmp_path / "host", context=64, pool=96)) as deployment:
            expected = answers(deployment, asked)
        with (
            opencl_device(int(share * weights_bytes(pack)) + KV_ROOM) as device,
            offloaded(pack, tmp_path / "card", {0: device}, options, context=64, pool=96) as deployment,
        ):
            assert device.memory.used > 0
            assert answers(deployment, asked) == expected

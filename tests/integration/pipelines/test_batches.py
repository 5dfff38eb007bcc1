"""A batch in micro-batches: every token is that of the request alone, whoever attends and whatever streams."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.offloading import answers, offloaded, prompts, weights_bytes
from tpi.devices.choose import open_device
from tpi.devices.options import KvPlace, OffloadOptions
from tpi.pack.reader import Pack
from worker.pipelines.accelerated import BatchAccelerated

SMALL: dict[str, Any] = {"context": 64, "pool": 96, "chunk": 32}  # tokens, pages


def alone(pack: Pack, cache: Path, asked: list[list[int]]) -> list[list[int]]:
    """Each request by itself on the host."""
    with closing(in_process_deployment(pack, [1], cache / "host", **SMALL)) as deployment:
        return [answer for prompt in asked for answer in answers(deployment, [prompt])]


@pytest.mark.parametrize("kv", ["auto", "gpu"])
@pytest.mark.parametrize("share", [0.5, 0.9, 3.0])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_tokens_of_a_batch_are_those_of_each_request_alone(
    family: str, share: float, kv: KvPlace, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    pack = tiny_pack(family)
    asked = prompts(pack.config.vocab, 11, seed=4)
    expected = alone(pack, tmp_path, asked)
    room = int(share * weights_bytes(pack)) + (4 << 20)
    with (
        closing(open_device("emu:1GiB,stretch=1", room)) as device,
        offloaded(
            pack, tmp_path / "batch", {0: device}, OffloadOptions(kv=kv, pipeline="batch"), **SMALL
        ) as deployment,
    ):
        link = deployment.node.link
        assert isinstance(link, BatchAccelerated)
        assert answers(deployment, asked) == expected
        assert device.memory.used <= link.plan.memory_bytes <= room

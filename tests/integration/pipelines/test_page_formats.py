"""Batches whose keys and values are quantised: the tokens of each request alone, wherever its pages lie."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.offloading import answers, batched, offloaded, prompts, weights_bytes
from tests.support.kernels.pairwise import pairwise
from tpi.devices.choose import open_device
from tpi.devices.options import KvPlace, OffloadOptions
from tpi.kernels.kv import KvDtype
from tpi.pack.reader import Pack

SMALL: dict[str, Any] = {"context": 64, "pool": 96, "chunk": 32}  # tokens, pages
FORMATS, PLACES = ("q8", "q4", "f16"), ("auto", "ram", "gpu")
FAMILIES = ("mixtral", "gptoss", "deepseek2")  # windows and sinks; keys and values from a latent vector


@pytest.mark.parametrize(("kv_dtype", "kv", "family"), pairwise(FORMATS, PLACES, FAMILIES))
def test_pages_of_every_format(
    kv_dtype: KvDtype, kv: KvPlace, family: str, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    pack = tiny_pack(family)
    asked = prompts(pack.config.vocab, 11, seed=6)
    with closing(in_process_deployment(pack, [1], tmp_path / "host", kv=kv_dtype, **SMALL)) as deployment:
        expected = [answer for prompt in asked for answer in answers(deployment, [prompt])]
    options = OffloadOptions("ram", kv, "batch")
    with (
        closing(open_device("emu:1GiB,stretch=1", weights_bytes(pack) + (12 << 20))) as card,
        offloaded(pack, tmp_path / "batch", {0: card}, options, kv=kv_dtype, **SMALL) as deployment,
    ):
        link = batched(deployment)
        assert link.offload.kv == kv or kv == "auto"
        assert answers(deployment, asked) == expected

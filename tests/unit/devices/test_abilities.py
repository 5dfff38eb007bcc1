"""Models that an accelerator's kernels do not know are refused by name."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from tpi.devices.abilities import check_model
from tpi.devices.base import Device
from tpi.devices.host import open_host
from tpi.errors import PlanError
from tpi.pack.reader import Pack


def test_kernels_without_sinks_or_latent_vectors_refuse_them(tiny_pack: Callable[..., Pack]) -> None:
    known = cast(Device, SimpleNamespace(name="card", kernels=object()))
    limited = cast(Device, SimpleNamespace(name="card", kernels=SimpleNamespace(plain_models=True)))
    for family in ("gptoss", "mixtral"):
        config = tiny_pack(family).config
        check_model(open_host(), config)
        check_model(known, config)
    check_model(limited, tiny_pack("mixtral").config)
    with pytest.raises(
        PlanError, match="card does not support attention sinks and experts of gptoss models; use --dev"
    ):
        check_model(limited, tiny_pack("gptoss").config)
    with pytest.raises(PlanError, match=r"card does not support latent vectors .deepseek2 models.; use --device cpu"):
        check_model(limited, tiny_pack("deepseek2").config)
    with pytest.raises(PlanError, match=r"card does not support recurrent layers .qwen35 models.; use --device cpu"):
        check_model(known, tiny_pack("qwen35").config)
    with pytest.raises(PlanError, match=r"card does not support gates of heads .museglimmer models.; use --device cpu"):
        check_model(known, tiny_pack("museglimmer").config)

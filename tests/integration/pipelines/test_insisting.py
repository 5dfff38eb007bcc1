"""Flags that batches cannot follow: they are refused with --pipeline batch, and otherwise no batch is chosen."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from master.options import RunOptions
from master.session import Session
from tpi.devices.options import DeviceOptions, OffloadOptions
from tpi.errors import PlanError
from tpi.pack.reader import Pack
from worker.pipelines.accelerated import BatchAccelerated

BATCH = OffloadOptions(pipeline="batch")
SLOW_HOST = "emu:1GiB,stretch=1,launch=1ns,latency=1ns,host=0.001"


def session(pack: Pack, cache: Path, offload: OffloadOptions, **more: Any) -> Session:
    devices = DeviceOptions((SLOW_HOST,), (6 << 20,), offload)
    return Session(RunOptions(str(pack.path), context=64, devices=devices, cache=cache, memory=1 << 28, **more))


@pytest.mark.parametrize(
    ("offload", "window", "flag"),
    [
        (replace(BATCH, crossover=7), {}, "crossover"),
        (BATCH, {"window": 2, "retain": 2}, "window"),
        (replace(BATCH, unattended=True), {"window": 1}, "window"),
    ],
)
@pytest.mark.parametrize("local", [0, 1])
def test_beside_pipeline_batch_they_are_refused_by_name(
    local: int, offload: OffloadOptions, window: dict[str, int], flag: str,
    tiny_pack: Callable[..., Pack], tmp_path: Path,
) -> None:  # fmt: skip
    said = f"^master: --{flag} has no effect with --pipeline batch.*; leave out one of the two$"
    with (
        pytest.raises(PlanError, match=said),
        session(tiny_pack("llama"), tmp_path, offload, local=local, parallel=8, **window),
    ):
        pass


@pytest.mark.parametrize(("crossover", "window"), [(None, 0), (7, 0), (None, 2)])
def test_where_the_pipeline_is_open_they_rule_batches_out(
    crossover: int | None, window: int, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    offload = OffloadOptions(crossover=crossover, unattended=True)
    with session(tiny_pack("llama"), tmp_path, offload, parallel=16, batched=99, window=window) as opened:
        assert isinstance(opened.node.link, BatchAccelerated) == (crossover is None and not window)
        assert opened.engine.deployment.at_once.requests == (99 if crossover is None and not window else 16)

"""`tpi plan` for experts that a card loads on demand: how many of each layer are in which memory."""

import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.paths import ROOT
from tpi.cli import tpi as main
from tpi.errors import PlanError
from tpi.pack.reader import Pack
from tpi.pack.routing import NAME, RoutingRecord, save_routing

MIXTRAL = str(ROOT / "tests/support/data/mixtral-8x7b/config.json")
CARD = ("--machine", "8GiB GPU, 64GiB RAM", "--dtype", "q4")
GIB = 1 << 30


def planned(*flags: str, cache: Path, model: str = MIXTRAL) -> str:
    """Return the output of `tpi plan`."""
    with redirect_stdout(StringIO()) as shown:
        main.main(["plan", "-m", model, *flags, "--cache", str(cache)], standalone_mode=False)
    return shown.getvalue()


def plan_json(*flags: str, cache: Path, model: str = MIXTRAL) -> dict[str, Any]:
    (node,) = json.loads(planned(*flags, "--json", cache=cache, model=model))["nodes"]
    assert isinstance(node, dict)
    return node


def test_how_many_experts_of_each_layer_lie_where(tmp_path: Path) -> None:
    node = plan_json(*CARD, "--pipeline", "demand", cache=tmp_path)
    experts, memory = node["experts"], node["memory"]
    assert experts["experts"] == 32 * 8
    assert experts["of_each_layer"] == 8
    assert sum(experts["there_by_layer"]) == experts["slots"]
    assert max(experts["there_by_layer"]) - min(experts["there_by_layer"]) <= 1
    assert experts["hit_rate"] == pytest.approx(experts["slots"] / 256)
    assert experts["hit_rate"] + experts["fetched"] + experts["computed_by_cpu"] == pytest.approx(1)
    assert 0.9 * 8 * GIB < memory["gpu"]["total"] <= 8 * GIB
    assert memory["ram"]["weights"] > 26 * GIB


def test_people_are_told_the_same(tmp_path: Path) -> None:
    shown = planned(*CARD, "--pipeline", "demand", cache=tmp_path)
    assert re.search(r"6\d of 256 fit there, at first 2( to 3)? of 8 of each layer", shown)
    assert "tpi profile measures" in shown


def test_what_was_recorded_decides(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    """The pack has a recorded routing that always uses the same experts, so these are on the card."""
    pack = tiny_pack("qwen3moe")
    mixture, layers = pack.config.mixture, pack.config.layers
    assert mixture is not None
    flags = ("--device", "emu:64MiB", "--pipeline", "demand")
    assert not plan_json(*flags, cache=tmp_path, model=str(pack.path))["experts"]["recorded"]
    chosen = np.tile(np.arange(mixture.used, dtype=np.uint16), (64, layers, 1))
    save_routing(pack.path / NAME, RoutingRecord("a text", 64, chosen))
    try:
        experts = plan_json(*flags, cache=tmp_path, model=str(pack.path))["experts"]
    finally:
        (pack.path / NAME).unlink()
    assert experts["recorded"]
    assert experts["hit_rate"] > 0.9


def test_none_are_planned_where_that_is_no_faster(tmp_path: Path) -> None:
    """This model's routing is not known, and slots would leave a smaller ring for its prompts."""
    assert plan_json(*CARD, cache=tmp_path)["experts"] is None


def test_a_card_without_room_for_all_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"all other weights must fit on it, and do not: --gpu-memory \d+MiB would do"):
        planned("--machine", "1GiB GPU, 64GiB RAM", "--pipeline", "demand", cache=tmp_path)

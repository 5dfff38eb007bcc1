"""`tpi plan` for several machines, given by flags, in a file, or by asking workers: which machine holds what."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from master.deployment.draft import NO_EFFECT
from tests.support.commands import counted, listening_worker, tpi, tpi_here
from tests.support.paths import ROOT

LARGE = str(ROOT / "tests/support/data/llama-3.1-70b/config.json")
GIB = 1 << 30
_MOST_CALLS = 3_000_000  # about a second on a quiet machine


def plan_json(*flags: str, cache: Path) -> dict[str, Any]:
    done = tpi_here("plan", *flags, "--json", cache=cache)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_70b_on_eight_machines_from_its_configuration(tmp_path: Path) -> None:
    flags = ("plan", "-m", LARGE, "--dtype", "q4", "--devices", "8x8GiB", "--json")
    printed, calls = counted(*flags, cache=tmp_path)
    found = json.loads(printed)
    nodes = found["nodes"]
    assert len(nodes) + len(found["left_out"]) == 8
    for layer in range(80):
        held = [node["holds"] for node in nodes if layer in range(*node["layers"][0])]
        assert sum(one["heads"] for one in held) == 64
        assert sum(one["neurons"] for one in held) == 28672  # neurons, no units of 32
    assert all(node["memory"]["total"] <= node["memory"]["limit"] < 8 * GIB for node in nodes)
    assert found["collective"] in ("star", "mesh", "two-shot", "tree", "ring")
    assert sum(found["token_s"].values()) == pytest.approx(1 / found["decode_tokens_per_s"])
    assert found["ttft_s"] > 0
    layouts = found["layouts"]
    assert [len(layouts[pure]["stages"]) for pure in ("one_stage", "one_node_a_stage")] == [1, 8]
    assert all(sum(one["parts"].values()) == pytest.approx(one["seconds"]) for one in layouts["best"])
    assert layouts["used"]["seconds"] <= 1.03 * layouts["best"][0]["seconds"]
    assert calls < _MOST_CALLS


def test_the_table_has_what_each_node_holds_and_what_would_help(tmp_path: Path) -> None:
    flags = ("--dtype", "q4", "--devices", "16GiB,3x8GiB", "--link", "1 Gbit, 0.2 ms")
    done = tpi("plan", "-m", LARGE, *flags, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in (
        "4 machines",
        "master ",
        "device-3",
        "tok/s",
        "a token: computing",
        "layout (ms a token)",
        "-> ",
        "all 4",
        "4 stages of 1 node",
        "summed by",
        "what would help most: 2x",
    ):
        assert text in done.stdout


def test_far_machines_are_left_out_by_name(model: str, tmp_path: Path) -> None:
    near = plan_json("-m", model, "--devices", "2x4GiB", "--link", "1 Gbit, 500 ms", cache=tmp_path)
    assert near["left_out"] == ["device-1"]
    assert near["with_everyone_tokens_per_s"] < near["decode_tokens_per_s"]
    done = tpi("plan", "-m", model, "--devices", "2x4GiB", "--link", "1 Gbit, 500 ms", cache=tmp_path)
    assert "left out, because the others are faster without: device-1" in done.stdout


def test_a_mixture_is_dealt_by_slices_of_experts(tmp_path: Path) -> None:
    mixtral = str(ROOT / "tests/support/data/mixtral-8x7b")
    found = plan_json("-m", mixtral, "--dtype", "q4", "--devices", "4x8GiB", cache=tmp_path)
    held = [node["holds"] for node in found["nodes"] if 0 in range(*node["layers"][0])]
    assert sum(one["experts"] for one in held) == 14336  # neurons of each expert


def test_workers_are_asked_how_fast_they_are(model: str, tmp_path: Path) -> None:
    with listening_worker(tmp_path / "a") as first, listening_worker(tmp_path / "b") as second:
        found = plan_json("-m", model, "--workers", f"{first},{second}", cache=tmp_path / "own")
        used = [name for stage in found["layouts"]["used"]["stages"] for name in stage["nodes"]]
        assert len([name for name in used if name != "master"]) == 2  # named workers are all used
    refused = tpi("plan", "-m", model, "--workers", first, cache=tmp_path / "own")
    assert refused.returncode != 0
    assert first.rpartition(":")[2] in refused.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--devices", "2x8GiB", "--topology", "paper-4-laptops"), "exclude each other"),
        (("--devices", "2x8GiB", "--machine", "8GiB RAM"), "describes one machine"),
        (("--devices", "2x8GiB", "--memory", "1GiB"), "--memory has no effect if --devices names the machines"),
        (
            ("--devices", "2x8GiB", "--memory", "1GiB", "--machine", "t4", "--batch", "9"),
            "--memory has no effect if --devices names the machines",
        ),
        (("--topology", "paper-4-laptops", "--weights", "disk"), "--weights has no effect if --topology"),
        (("--link", "1 Gbit, 1 ms"), "give it with --devices only"),
        (("--workers", "nowhere"), "HOST:PORT"),
        (("--devices", "2xlarge"), "is not"),
        (("--topology", "no-such-home"), "paper-4-laptops"),
        (("--devices", "2x8GiB", "--stages", "3"), "at most 2, the number of nodes with a share"),
        (("--devices", "2x8GiB", "--stages", "0-29:cellar"), "the node 'cellar', but the nodes are master, device-1"),
        (("--machine", "8GiB RAM", "--stages", "2"), "at most 1, the number of nodes with a share"),
    ],
)
def test_flags_that_contradict(flags: tuple[str, ...], said: str, model: str, tmp_path: Path) -> None:
    done = tpi_here("plan", "-m", model, *flags, cache=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(("home", "stages"), [("lan-10ms-1gb", 1), ("paper-4-laptops", 2)])
def test_shipped_homes_get_few_stages_for_a_large_model(home: str, stages: int, tmp_path: Path) -> None:
    """Over Wi-Fi, laptops hold whole layers rather than shares of each layer."""
    found = plan_json("-m", LARGE, "--dtype", "q4", "--topology", home, cache=tmp_path)
    used = found["layouts"]["used"]
    assert len(used["stages"]) >= stages
    assert used["seconds"] <= 1.03 * found["layouts"]["one_stage"]["seconds"]
    assert [stage["layers"][0] for stage in used["stages"]] == [
        0, *(stage["layers"][1] for stage in used["stages"][:-1])
    ]  # fmt: skip


def test_memory_for_weights_on_their_way_from_disk_counts_in_the_choice(tmp_path: Path) -> None:
    """One machine could hold these experts alone, but not also the memory through which it would read the rest."""
    models = json.loads((ROOT / "master/models/recommended.json").read_text())
    config = next(one["config"] for one in models if "Nemotron-3-Nano" in one["name"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    home = ("--dtype", "q4", "--devices", "2x20GiB", "--link", "1 Gbit, 1 ms")
    found = plan_json("-m", str(tmp_path), *home, cache=tmp_path)
    assert [node["layers"] for node in found["nodes"]] == [[[0, 12]], [[12, 29]]]
    assert found["token_s"]["disks"] < 0.01 * sum(found["token_s"].values())


@pytest.mark.parametrize(
    ("asked", "layers"),
    [
        ("2", [[[0, 40]], [[0, 40]], [[40, 80]], [[40, 80]]]),
        ("0-59:device-2,60-79:master+device-1", [[[60, 80]], [[60, 80]], [[0, 60]]]),
        ("0-19:master,20-39:device-1,40-59:master,60-79:device-1", [[[0, 20], [40, 60]], [[20, 40], [60, 80]]]),
    ],
)
def test_stages_are_planned_as_a_run_would_lay_them_out(asked: str, layers: list[Any], tmp_path: Path) -> None:
    flags = ("-m", LARGE, "--dtype", "q4", "--devices", "4x16GiB", "--stages", asked)
    found = plan_json(*flags, cache=tmp_path)
    assert [node["layers"] for node in found["nodes"]] == layers
    assert found["with_everyone_tokens_per_s"] is None  # nothing is said against the user's choice
    for node in found["nodes"]:
        fellows = sum(each["layers"] == node["layers"] for each in found["nodes"])
        assert node["holds"]["heads"] == 64 / fellows
    assert sum(found["token_s"].values()) == pytest.approx(1 / found["decode_tokens_per_s"])


def test_one_stage_is_planned_on_request(tmp_path: Path) -> None:
    found = plan_json("-m", LARGE, "--dtype", "q4", "--topology", "paper-4-laptops", "--stages", "1", cache=tmp_path)
    assert len(found["layouts"]["used"]["stages"]) == 1
    assert 0 in [layer for node in found["nodes"] for layers in node["layers"] for layer in layers]


def test_a_draft_model_takes_memory_of_the_master(model: str, tmp_path: Path) -> None:
    flags = ("-m", model, "--memory", "1GiB")
    done = tpi_here("plan", *flags, "--json", "--draft", model, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    taken = int(re.search(r"the draft model takes (\d+) MiB", done.stderr)[1])  # type: ignore[index]
    without, with_draft = plan_json(*flags, cache=tmp_path), json.loads(done.stdout)
    less = without["nodes"][0]["machine"]["memory"] - with_draft["nodes"][0]["machine"]["memory"]
    assert taken << 20 <= less < (taken + 1) << 20


def test_draft_models_that_a_run_refuses_are_refused(model: str, tmp_path: Path) -> None:
    machine = "2GiB GPU, 16GiB RAM, 2GB/s disk"
    card = tpi_here("plan", "-m", model, "--machine", machine, "--draft", model, cache=tmp_path)
    assert (card.returncode, "--draft has no effect" in card.stderr) == (2, True)
    large = tpi_here("plan", "-m", model, "--devices", "2x8GiB", "--draft", LARGE, cache=tmp_path)
    assert large.returncode != 0
    assert "--draft" in large.stderr
    assert "does not fit" in large.stderr or "memory" in large.stderr


@pytest.mark.parametrize(
    ("home", "fits"),
    [
        (("--machine", "12GiB RAM, 2GB/s disk"), False),
        (("--machine", "64GiB RAM, 2GB/s disk"), True),
        (("--devices", "2x8GiB"), False),
        (("--devices", "4x24GiB"), True),
    ],
)
def test_a_draft_model_needs_all_experts_in_memory(
    home: tuple[str, ...], fits: bool, model: str, tmp_path: Path
) -> None:
    mixtral = str(ROOT / "tests/support/data/mixtral-8x7b")
    done = tpi_here("plan", "-m", mixtral, "--dtype", "q4", *home, "--draft", model, cache=tmp_path)
    assert (done.returncode == 0) == fits, done.stderr
    assert (NO_EFFECT in done.stderr) == (not fits)


def test_for_several_answers_stages_of_one_machine_win(tmp_path: Path) -> None:
    flags = ("-m", LARGE, "--dtype", "q4", "--devices", "4x24GiB")
    one, four = (plan_json(*flags, "--batch", str(count), cache=tmp_path) for count in (1, 4))
    used = {count: found["layouts"]["used"] for count, found in ((1, one), (4, four))}
    assert used[1]["seconds"] < used[4]["seconds"]
    assert used[4]["seconds_at_once"] < used[4]["seconds"] / 2
    assert len(used[4]["stages"]) > len(used[1]["stages"])
    assert one["decode_tokens_per_s_at_once"] == pytest.approx(one["decode_tokens_per_s"])
    assert four["decode_tokens_per_s_at_once"] > 1.1 * one["decode_tokens_per_s"]
    printed = tpi("plan", *flags, "--batch", "4", cache=tmp_path).stdout
    assert "4 answers at once: " in printed
    assert "4 at once" in printed

"""`tpi plan`: its table and JSON, the modules that it does not import, and wrong uses."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import clean, counted, tpi, tpi_here
from tests.support.paths import ROOT
from tpi.cli import tpi as main
from tpi.devices.trial import find_accelerator
from tpi.errors import UsageError
from tpi.pack.reader import Pack

LARGE = str(ROOT / "tests/support/data/llama-3.1-70b/config.json")
LAPTOP = ("--machine", "8GiB GPU, 16GiB RAM, 2GB/s disk")
GIB = 1 << 30
_MOST_CALLS = 3_000_000


def plan_json(*flags: str, cache: Path, model: str = LARGE) -> dict[str, Any]:
    done = tpi_here("plan", "-m", model, *flags, "--json", cache=cache)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_model_of_70b_from_its_configuration_alone(tmp_path: Path) -> None:
    found = plan_json("--dtype", "q4", *LAPTOP, cache=tmp_path)
    (node,) = found["nodes"]
    assert found["model"]["layers"] == 80
    assert 40 * GIB < found["model"]["weight_bytes"] < 44 * GIB
    assert found["model"]["kv_bytes"] == 4096 * 80 * 2 * 8 * 128 * 2
    lying = [node["segments"][kind]["lie"][tier] for kind in ("attention", "ffn") for tier in ("gpu", "ram", "disk")]
    assert sum(each["bytes"] for each in lying) + 2 * 1.0625 * 128256 * 8192 == found["model"]["weight_bytes"]
    for memory, size in (("gpu", 8 * GIB), ("ram", 16 * GIB)):
        assert 0.9 * size * 0.9 < node["memory"][memory]["total"] <= node["memory"][memory]["limit"] <= size
    streamed = sum(node["segments"][kind]["lie"]["disk"]["bytes"] for kind in ("attention", "ffn"))
    assert 1 / found["decode_tokens_per_s"] == pytest.approx(streamed / 2e9, rel=0.02)
    assert node["bottleneck"] == {"prompt": "disk", "decode": "disk"}
    assert [gain["thing"] for gain in node["gains"][:2]] == ["RAM", "disk speed"]


def test_it_answers_after_few_calls(tmp_path: Path) -> None:
    """About a second on a quiet machine."""
    _, calls = counted("plan", "-m", LARGE, "--dtype", "q4", *LAPTOP, cache=tmp_path)
    assert calls < _MOST_CALLS


def test_two_cards_are_planned_together(model: str, tmp_path: Path) -> None:
    """Each card has its memory and its lanes; both together hold all weights, which neither could alone."""
    whole = plan_json("--device", "emu:1GiB", "--weights", "gpu", cache=tmp_path, model=model)["model"]["weight_bytes"]
    limits = [round(share * whole) for share in (0.8, 1.0)]
    sizes = [flag for limit in limits for flag in ("--device", "emu:1GiB", "--gpu-memory", f"{limit}B")]
    flags = ("--weights", "gpu", "-c", "64", *sizes)
    (node,) = plan_json(*flags, cache=tmp_path, model=model)["nodes"]
    for memory, size in zip(("gpu", "gpu 2"), limits, strict=True):
        assert 0.3 * size < node["memory"][memory]["total"] <= node["memory"][memory]["limit"] == size
    assert set(node["cards"]) == {0, 1}
    assert {"accelerator", "accelerator 2"} <= node["use_percent"]["decode"].keys()
    done = tpi("plan", "-m", model, *flags, cache=tmp_path)
    assert "GPU 2 has" in done.stdout


def test_auto_plans_with_what_is_here(model: str, tmp_path: Path) -> None:
    """Plan with `--device auto`: it uses the graphics chip of this machine, if there is one, as a run does."""
    (node,) = plan_json("--device", "auto", "--memory", "1GiB", cache=tmp_path, model=model)["nodes"]
    found = find_accelerator()
    assert (node["machine"]["accelerator"] is None) == (found is None)
    assert ("no graphics chip was found" in node["measured"]) == (found is None)
    if found is not None:
        found.close()


def test_a_prompt_is_taken_to_the_gpu_and_a_token_is_not(tmp_path: Path) -> None:
    flags = ("--dtype", "q4", "--machine", "8GiB GPU, 64GiB RAM, 4GB/s link", "--weights", "ram", "--kv", "ram")
    (node,) = plan_json(*flags, cache=tmp_path)["nodes"]
    computed = node["segments"]["ffn"]["computed"]
    assert computed["prompt"]["host"] == computed["decode"]["accelerator"] == 0
    assert 1 < node["crossover_tokens"]["ram"] < 512


def test_the_table_says_it_for_people(tmp_path: Path) -> None:
    done = tpi("plan", "-m", LARGE, "--dtype", "q4", *LAPTOP, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in ("80 layers", "feed-forward", "tok/s", "disk 100%", "what would help most: 2x RAM", "pipeline"):
        assert text in done.stdout
    assert not list(tmp_path.iterdir())  # nothing was measured, packed or fetched


def test_torch_and_transformers_are_not_imported(tmp_path: Path) -> None:
    program = (
        "import sys; from tpi.cli import tpi; tpi(sys.argv[1:], standalone_mode=False);"
        "heavy = {'torch', 'transformers', 'tokenizers', 'triton', 'pyopencl', 'scipy'} & sys.modules.keys();"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    command = [sys.executable, "-c", program, "plan", "-m", LARGE, "--dtype", "q4", *LAPTOP, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=clean(tmp_path), timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_this_machine_is_measured_once(model: str, tmp_path: Path) -> None:
    first = plan_json("--memory", "1GiB", cache=tmp_path, model=model)
    (node,) = first["nodes"]
    assert node["machine"]["accelerator"] is None
    assert node["memory"]["ram"]["limit"] == GIB
    assert "measured" in node["measured"]
    again = plan_json("--memory", "1GiB", cache=tmp_path, model=model)
    assert again["nodes"][0]["machine"] == node["machine"]


def test_an_emulated_machine_has_the_figures_it_says(model: str, tmp_path: Path) -> None:
    (node,) = plan_json("--device", "emu:1MiB,link=2GB/s,disk=1GB/s", cache=tmp_path, model=model)["nodes"]
    assert node["machine"]["accelerator"]["link"]["up"] == 2e9
    assert node["machine"]["disk"]["read"] == 1e9
    assert node["memory"]["gpu"]["total"] <= 1 << 20


def test_a_directory_a_pack_and_a_configuration_take_the_same(
    model: str, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    names = (model, f"{model}/config.json", str(tiny_pack("llama", "q8").path))
    found = [plan_json("--dtype", "q8", *LAPTOP, cache=tmp_path, model=name) for name in names]
    assert len({each["model"]["weight_bytes"] for each in found}) == 1
    assert found[0]["nodes"] == found[1]["nodes"] == found[2]["nodes"]


TWO = ("--device", "emu:8GiB", "--device", "emu:8GiB")
WRONG = [
    (("--machine", "8 apples"), "'8 apples' does not describe a part of a machine"),
    (("--machine", "8GiB GPU", "--device", "emu:1GiB"), "--machine and --device exclude each other"),
    ((*LAPTOP, "--gpu-memory", "9GiB"), "give at most 8192MiB"),
    (("--machine", "16GiB RAM", "--gpu-memory", "9GiB"), "--gpu-memory goes with an accelerator"),
    ((*LAPTOP, "--weights", "gpu"), r"--gpu-memory \d+MiB would do"),
    ((*LAPTOP, "--weights", "ram"), r"--memory \d+MiB would do"),
    *(
        (("--machine", "16GiB RAM", f"--{flag}", value), f"--{flag} is for an accelerator, and this node has none")
        for flag, value in (
            ("kv", "gpu"),
            ("kv", "ram"),
            ("weights", "disk"),
            ("pipeline", "memory"),
            ("pipeline", "batch"),
            ("pipeline", "demand"),
        )
    ),
    ((*LAPTOP, "--remeasure"), "--remeasure measures this machine"),
    (("--device", "emu:1GiB", "--remeasure"), "--remeasure measures this machine"),
    ((*TWO, "--batch", "8", "--pipeline", "batch", "--svg", "roofs.svg"), "leave it out where several are named"),
    ((*TWO, "--batch", "8", "--svg", "roofs.svg"), "a batch on one accelerator, and this one has several"),
    (("--devices", "2x64GiB", *TWO, "--batch", "8"), "a batch on one accelerator, and this one has several"),
    ((*LAPTOP, "--memory", "100MiB"), r"--memory \d+MiB would do"),
    ((*LAPTOP, "--memory", "0"), "--memory 0 leaves nothing"),
    ((*LAPTOP, "--memory", "lots"), "'lots' is not a size"),
    ((*LAPTOP, "-c", "200000"), "over the 131072 tokens"),
    ((*LAPTOP, "-c", "600", "--prompt-tokens", "599"), "do not fit into a context of 600"),
    ((*LAPTOP, "--dtype", "q3"), "--dtype q3 is not known"),
    (("--device", "emu:lots"), "emu:lots"),
    (("--device", "abacus"), "no device called 'abacus'"),
]


@pytest.mark.parametrize(("flags", "sentence"), WRONG, ids=[" ".join(flags[-2:]) for flags, _ in WRONG])
def test_what_is_wrong_is_one_sentence(flags: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    dtype = () if "--dtype" in flags else ("--dtype", "q4")
    arguments = ["plan", "-m", LARGE, *dtype, *flags, "--cache", str(tmp_path)]
    with pytest.raises(UsageError, match=sentence) as error:
        main.main(arguments, standalone_mode=False)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model", ["nowhere.json", "config.json"])
def test_a_model_that_is_none_is_one_sentence_on_stderr(model: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Abacus"]}')
    done = tpi("plan", "-m", str(tmp_path / model), *LAPTOP, cache=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tpi: ")
    assert done.stderr.count("\n") == 1


def test_with_several_cards_no_micro_batches_are_planned(model: str, tmp_path: Path) -> None:
    """A run uses all cards together, so figures for micro-batches on one of them would be wrong."""
    flags = (*TWO, "-c", "64", "--batch", "4")
    done = tpi("plan", "-m", model, *flags, cache=tmp_path)
    assert done.returncode == 0
    assert "GPU 2 has" in done.stdout
    assert "in a batch" not in done.stdout
    assert done.stderr == (
        "tpi: the plan is without micro-batches: a node computes a batch on one accelerator, and this one has several; "
        "start one worker for each of them (on the master's machine, --pipeline batch does that)\n"
    )
    assert "batch" not in plan_json(*flags, cache=tmp_path, model=model)


def test_micro_batches_are_planned_where_they_are_insisted_on(model: str, tmp_path: Path) -> None:
    """Plan with `--pipeline batch`, which means micro-batches even for one request, as in `tpi run`."""
    flags = ("--device", "emu:1GiB", "-c", "64", "--pipeline", "batch")
    for count in (1, 4):
        planned = plan_json(*flags, "--batch", str(count), cache=tmp_path, model=model)
        assert planned.keys() == {"batch"}
        assert 1 <= planned["batch"]["policy"]["batch"] <= count

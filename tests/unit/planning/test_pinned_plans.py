"""The plans that `tpi plan` chooses for the machines of docs/planning.md and the emulated presets are as stored.

`python -m tests.unit.planning.test_pinned_plans` writes the file anew. Times are not pinned. Candidates within noise
may change places: list each change, with the forecasts of both plans, in the commit that makes it.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner

from tests.support.paths import DATA
from tpi.cli import tpi

PINNED = DATA / "plans.json"
LLAMA_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336}
DESCRIBED = ("--machine", "8GiB GPU, 16GiB RAM, 2GB/s disk")
CASES = {
    "70b described": ("llama-3.1-70b", "q4", *DESCRIBED),
    "70b described, keys in RAM": ("llama-3.1-70b", "q4", *DESCRIBED, "--kv", "ram"),
    "70b described, memory pipeline": ("llama-3.1-70b", "q4", *DESCRIBED, "--pipeline", "memory"),
    "70b described, weights in RAM and on disk": ("llama-3.1-70b", "q4", *DESCRIBED, "--weights", "disk"),
    "70b laptop without a card": ("llama-3.1-70b", "q4", "--machine", "16GiB RAM, 3GB/s disk"),
    "8b rtx3060-laptop": ("llama-3.1-8b", "q4", "--device", "emu:rtx3060-laptop"),
    "8b bf16 rtx3060-laptop": ("llama-3.1-8b", "bf16", "--device", "emu:rtx3060-laptop"),
    "8b bf16 rtx4090-desktop": ("llama-3.1-8b", "bf16", "--device", "emu:rtx4090-desktop"),
    "70b rtx4090-desktop": ("llama-3.1-70b", "q4", "--device", "emu:rtx4090-desktop"),
    "70b pc-high": ("llama-3.1-70b", "q4", "--device", "emu:pc-high"),
    "70b pc-low": ("llama-3.1-70b", "q4", "--device", "emu:pc-low"),
    "8b two cards": ("llama-3.1-8b", "bf16", "--device", "emu:8GiB", "--device", "emu:6GiB,link=6GB/s,name=b"),
    "mixtral t4": ("mixtral-8x7b", "bf16", "--device", "emu:t4"),
    "mixtral t4, batch of 512": ("mixtral-8x7b", "bf16", "--device", "emu:t4", "--batch", "512"),
    "mixtral l4, batch of 256": ("mixtral-8x7b", "q4", "--device", "emu:l4", "--batch", "256"),
    "mixtral t4, on demand": ("mixtral-8x7b", "q4", "--device", "emu:t4", "--pipeline", "demand"),
    "mixtral laptop": ("mixtral-8x7b", "q4", "--device", "emu:rtx3060-laptop"),
    "8b batch of 128": ("llama-3.1-8b", "bf16", "--device", "emu:rtx3060-laptop", "--batch", "128"),
}
VARIES = {"model", "request", "machine", "measured", "use_percent", "gains", "reasons", "compared", "bottleneck"}


def chosen(fields: Any) -> Any:
    """Return the decisions among the fields of `--json`, without forecasts and inputs."""
    if isinstance(fields, dict):
        kept = {name: chosen(value) for name, value in fields.items() if name not in VARIES}
        return {name: value for name, value in kept.items() if value not in (None, {}, [])}
    if isinstance(fields, list):
        return [found for each in fields if (found := chosen(each)) not in (None, {}, [])]
    return None if isinstance(fields, float) else fields


def planned(case: str, folder: Path) -> Any:
    model, dtype, *flags = CASES[case]
    directory = DATA / model
    if model == "llama-3.1-8b":
        directory = folder / model
        directory.mkdir(exist_ok=True)
        config = json.loads((DATA / "llama-3.1-70b/config.json").read_text()) | LLAMA_8B
        (directory / "config.json").write_text(json.dumps(config))
    words = ["plan", "-m", str(directory / "config.json"), "--dtype", dtype, "--json", "--cache", str(folder), *flags]
    with (
        patch("master.planning.report.gains", return_value=[]),
        patch("master.planning.batch.batch_gains", return_value=[]),
    ):  # most of the time, and not pinned
        done = CliRunner().invoke(tpi, words)
    assert done.exit_code == 0, done.output
    return chosen(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_as_pinned(case: str, tmp_path: Path) -> None:
    assert planned(case, tmp_path) == json.loads(PINNED.read_text())[case]


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        found = {case: planned(case, Path(name)) for case in CASES}
    lines = ",\n".join(f"{json.dumps(case)}: {json.dumps(plan)}" for case, plan in found.items())
    PINNED.write_text(f"{{\n{lines}\n}}\n")

"""Each field of `--json` that docs/ names is in the command's output."""

import json
from pathlib import Path
from typing import Any

import pytest

from allreduce.choose import Choice
from tests.support.commands import tpi
from tests.support.paths import ROOT

FIELDS = [
    ("docs/testbed.md", "bench", ("predicted_sync_ms", "choice", "nodes.sync_ms_per_token")),
    ("docs/network.md", "run", ("choice",)),
    ("docs/planning.md", "plan", ("nodes",)),
]
FLAGS = {
    "bench": ("--local", "1", "--prompt-tokens", "8", "--gen-tokens", "2", "--repeat", "1", "-c", "32"),
    "run": ("-p", "Hello", "--raw", "-n", "2", "-c", "32"),
    "plan": ("--machine", "16GiB RAM"),
}


@pytest.mark.parametrize(("document", "command", "fields"), FIELDS)
def test_a_field_that_a_document_names_is_printed(
    document: str, command: str, fields: tuple[str, ...], model: str, cache: Path
) -> None:
    done = tpi(command, "-m", model, *FLAGS[command], "--json", cache=cache)
    assert done.returncode == 0, done.stderr
    text = (ROOT / document).read_text()
    for path in fields:
        found: Any = json.loads(done.stdout.splitlines()[-1])
        assert f"`{path.split('.')[-1]}" in text, f"{document} does not name {path} any more"
        for name in path.split("."):
            found = found[0] if isinstance(found, list) else found
            assert name in found
            found = found[name]


def test_the_choice_lists_the_prediction_for_each_collective() -> None:
    chosen = Choice("star", "mesh", False, 8, 64, {"star": (0.001, 0.0, 0.0)}, {})
    assert "`choice.predicted_ms`" in (ROOT / "docs/testbed.md").read_text()
    assert chosen.fields()["predicted_ms"] == {"star": [1.0, 0.0, 0.0]}

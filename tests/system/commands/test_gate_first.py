"""SwiGLU models gate first, as people type it: refused, profiled, then run in a group."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.support.commands import tpi
from tests.support.models import TinyModel


def test_from_the_refusal_over_the_profile_to_a_group(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    model, cache, text = str(tiny_model("llama3").directory), tmp_path / "cache", tmp_path / "text"
    text.write_text("A neuron that counts for little is left out. " * 60)
    asked = ("-m", model, "-p", "Hello", "-n", "8", "--temp", "0", "-c", "64")
    refused = tpi("run", *asked, "--sparsity", "static", cache=cache)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].endswith(f"make it with: tpi profile -m {model} --text FILE")
    profiled = tpi("profile", "-m", model, "--text", str(text), "--json", cache=cache)
    assert profiled.returncode == 0, profiled.stderr
    shares = json.loads(profiled.stdout)["gates"]["skipped"]
    assert list(shares.values()) == sorted(shares.values())
    group = tpi("run", *asked, "--sparsity", "static", "--sparsity-error", "0.3", "--local", "2", cache=cache)
    assert group.returncode == 0, group.stderr
    said = [line for line in (group.stdout + group.stderr).splitlines() if "were skipped after their gate" in line]
    assert [line.split(":")[0] for line in said] == ["master", "worker-1", "worker-2"]
    assert len(list((cache / "packs").glob("*-gate-first-*"))) == 1

"""Sparse models that do not fit into memory: runs stay within `--memory`, read neuron by neuron, and say so."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import tpi
from tests.support.weights.regular import NeuronUse, write_regular

pytestmark = pytest.mark.bare

MIB = 1 << 20
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 3072,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "eos_token_id": 2,
}  # fmt: skip
PROMPT = ("--raw", "-p", "abc", "--temp", "0", "-n", "60", "-c", "256")
SAID = re.compile(
    r".*neurons are read from disk when they are needed: (\d+) records per step, (\d+)% found in memory, "
    r"([\d.]+) MB read \(all neurons: ([\d.]+) MB\), (\d+) KiB per read.*"
)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack with 57 MB of neurons in f32, a tenth of them active, numbered as a profile numbers them."""
    use = NeuronUse(rank=32, hot_first=True)
    return write_regular(tmp_path_factory.mktemp("relu") / "pack", SHAPE, use, "f32").path


def run(pack: Path, *flags: str) -> dict[str, Any]:
    done = tpi("run", "-m", str(pack), "--dtype", "f32", *PROMPT, "--json", *flags, cache=pack.parent / "cache")
    assert done.returncode == 0, done.stderr
    fields: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return fields


@pytest.fixture(scope="module")
def whole(pack: Path) -> dict[str, Any]:
    fields = run(pack, "--sparsity", "static")
    assert not any(SAID.fullmatch(node["accelerator"]) for node in fields["nodes"])
    return fields


@pytest.mark.parametrize(("nodes", "memory"), [(1, 42), (3, 24)])
def test_a_part_of_the_neurons_in_memory(nodes: int, memory: int, pack: Path, whole: dict[str, Any]) -> None:
    local = ("--local", str(nodes - 1)) if nodes > 1 else ()
    fields = run(pack, "--sparsity", "static", "--memory", f"{memory}MiB", *local)
    assert fields["token_ids"] == whole["token_ids"]
    assert len(fields["nodes"]) == nodes
    for node in fields["nodes"]:
        assert node["planned_bytes"] <= memory * MIB
        if nodes == 1 or node["rank"]:  # a master has what it sends, too, while it sends it
            assert node["peak_rss_bytes"] - node["bare_rss_bytes"] <= memory * MIB
        said = SAID.fullmatch(node["accelerator"])
        assert said, node["accelerator"]
        _, found, read, everything, _ = (float(each) for each in said.groups())
        assert 20 < found <= 100
        assert read < everything


def test_both_ways_take_turns_within_the_memory(pack: Path, whole: dict[str, Any]) -> None:
    fields = run(pack, "--sparsity", "auto", "--memory", "56MiB")
    (node,) = fields["nodes"]
    assert fields["token_ids"] == whole["token_ids"]
    assert node["planned_bytes"] <= 56 * MIB
    assert node["peak_rss_bytes"] - node["bare_rss_bytes"] <= 56 * MIB
    assert re.search(
        r"a token takes [\d.]+ ms with all neurons and [\d.]+ ms with the predicted ones", node["accelerator"]
    )

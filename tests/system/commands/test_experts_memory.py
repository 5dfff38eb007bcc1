"""Models with experts that do not fit into memory: runs stay within `--memory` and report on the experts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import tpi
from tests.support.weights.shapes import write_byte_tokenizer
from tpi.pack.library.locate import open_model
from tpi.pack.routing import NAME, load_routing

pytestmark = pytest.mark.bare

MIB = 1 << 20
PROMPT = ("--raw", "-p", "a model larger than the memory that it is given", "--temp", "0", "-n", "24", "-c", "256")
MEMORY = 19  # MiB of each node: a quarter of its experts, beside what always stays
SAID = re.compile(
    r"experts are read from disk on demand: (\d+) of 64 are in memory, (\d+)% of the chosen ones were there "
    r"\(at best (\d+)%\), ([\d.]+) MB read per step \(at best ([\d.]+)\), "
    r"\d+ were prefetched \(\d+ used, \d+ wasted\); evicted by (.*)"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of OLMoE's architecture: 75 MB of experts in f32, 16 in each of four layers; a token uses two."""
    import torch
    import transformers

    path = tmp_path_factory.mktemp("model") / "olmoe"
    config = transformers.OlmoeConfig(
        hidden_size=256, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, num_experts=16, num_experts_per_tok=2, max_position_embeddings=512, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(26)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    write_byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def cache(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    open_model(str(model), "f32", cache)
    return cache


def run(model: Path, cache: Path, *flags: str) -> dict[str, Any]:
    done = tpi("run", "-m", str(model), "--dtype", "f32", *PROMPT, "--json", *flags, cache=cache)
    assert done.returncode == 0, done.stderr
    fields: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return fields


def test_a_quarter_of_the_experts_in_memory_in_a_group_of_three(model: Path, cache: Path) -> None:
    whole = run(model, cache, "--local", "2")
    assert not any(node["accelerator"] for node in whole["nodes"])
    fields = run(model, cache, "--local", "2", "--memory", f"{MEMORY}MiB")
    assert fields["token_ids"] == whole["token_ids"]
    assert len(fields["nodes"]) == 3
    for node in fields["nodes"]:
        assert node["planned_bytes"] <= MEMORY * MIB
        assert node["peak_rss_bytes"] - node["bare_rss_bytes"] <= MEMORY * MIB
        said = SAID.fullmatch(node["accelerator"])
        assert said, node["accelerator"]
        held, found, best, read, least = (float(said[at]) for at in range(1, 6))
        assert 8 <= held <= 64 * 0.34
        assert 0 < found <= best + 1
        assert 0 < least <= read + 0.01
        assert node["streamed_bytes_per_token"] > 0


def test_a_profile_records_chosen_experts_and_a_run_uses_it(model: Path, cache: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("What goes round comes round, and each word is another expert's. " * 40)
    pack = open_model(str(model), "f32", cache).path
    profile = ("profile", "-m", str(pack), "--text", str(text), "--tokens", "2048")
    done = tpi(*profile, cache=cache)
    assert done.returncode == 0, done.stderr
    assert "a cache of 25.0% of the experts has a hit rate of" in done.stdout
    assert load_routing(pack / NAME).experts.shape == (2048, 4, 2)
    before = (pack / NAME).read_bytes()
    again = json.loads(tpi(*profile, "--json", cache=cache).stdout)
    assert (pack / NAME).read_bytes() == before  # nothing was left to do
    assert [one["experts"] for one in again["held"]] == [0.125, 0.25, 0.5]
    assert all(one["lru"] <= one["belady"] and one["found"] <= one["belady"] for one in again["held"])
    (node,) = run(pack, cache, "--memory", "40MiB")["nodes"]
    assert re.search(
        r"evicted by .* \(\d+% hits in the recorded routing, LRU \d+%, at best \d+%\)", node["accelerator"]
    )
    refused = tpi(*profile, "--predictors", cache=cache)
    assert refused.returncode == 2
    assert "has experts; leave it out" in refused.stderr
    (pack / NAME).write_bytes(b"broken")
    broken = tpi("run", "-m", str(pack), "--dtype", "f32", *PROMPT, "--memory", "40MiB", cache=cache)
    assert broken.returncode == 0
    assert "routing.npz cannot be used" in broken.stderr

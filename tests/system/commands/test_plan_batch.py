"""`tpi plan --batch`: the policy of a batch from a configuration alone, as sentences, as JSON and as a picture."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.commands import tpi_here
from tests.support.paths import ROOT

LARGE = str(ROOT / "tests/support/data/llama-3.1-70b/config.json")

MIXTRAL = str(ROOT / "tests/support/data/mixtral-8x7b/config.json")
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
ASKED = ("--dtype", "bf16", "--device", "emu:t4", "--batch", "512", "--prompt-tokens", "77", "--gen-tokens", "128")


def test_the_papers_setting(tmp_path: Path) -> None:
    """Mixtral 8x7B on a T4 (setting S1): attention on the CPU, in micro-batches of about the paper's size."""
    picture = tmp_path / "roofs.svg"
    done = tpi_here("plan", "-m", MIXTRAL, *ASKED, "--svg", str(picture), "--json", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    batch = json.loads(done.stdout)["batch"]
    policy = batch["policy"]
    assert (policy["batch"], policy["attention_there"], policy["ffn_there"]) == (512, False, True)
    assert 20 < policy["micro_batch"] < 80
    assert batch["roof"]["decode"] == "up"
    assert batch["tokens_per_s"] == pytest.approx(512 * 128 / (batch["prompt_s"] + 127 * batch["token_s"]), rel=1e-9)
    assert batch["gains"][0]["thing"] == "link speed"
    assert batch["memory"]["gpu"] <= 16 << 30
    texts = [node.text for node in ElementTree.parse(picture).iter() if node.tag.endswith("text")]
    assert {"P1", "P2", "N = 512", "f16 keys and values"} <= set(texts)


def test_keys_and_values_are_divided_where_that_is_faster(tmp_path: Path) -> None:
    """Llama 2 7B on an L4, which nearly holds it: dividing is faster than all keys and values on either side."""
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    asked = ("--dtype", "bf16", "--device", "emu:l4", "--batch", "128", "--prompt-tokens", "418", "--gen-tokens", "128")
    found = {}
    for kv in ("auto", "ram", "gpu"):
        done = tpi_here("plan", "-m", str(tmp_path / "llama"), *asked, "--kv", kv, "--json", cache=tmp_path)
        assert done.returncode == 0, done.stderr
        found[kv] = json.loads(done.stdout)["batch"]
    kept = {kv: batch["policy"]["kv_kept"] for kv, batch in found.items()}
    assert (kept["ram"], kept["gpu"]) == (0, 1)
    assert 0 < kept["auto"] < 1
    assert 32 * kept["auto"] == int(32 * kept["auto"])
    assert found["auto"]["tokens_per_s"] > 1.05 * max(found[kv]["tokens_per_s"] for kv in ("ram", "gpu"))


def test_in_words(tmp_path: Path) -> None:
    done = tpi_here("plan", "-m", MIXTRAL, *ASKED, "--kv", "ram", cache=tmp_path)  # a search of a third of the plans
    assert done.returncode == 0, done.stderr
    for text in ("micro-batches of", "attention on the CPU, neurons on the GPU", "the roof for tokens is the link"):
        assert text in done.stdout


def test_without_an_accelerator_the_cpu_computes_the_batch(tmp_path: Path) -> None:
    machine = ("--machine", "64GiB RAM", "--dtype", "q4", "--batch", "32", "-c", "512")
    done = tpi_here("plan", "-m", MIXTRAL, *machine, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "attention on the CPU, neurons on the CPU" in done.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--svg", "roofs.svg"), "give --batch"),
        (("--batch", "8", "--svg", "/nowhere/roofs.svg"), "give --svg another file"),
        (("--batch", "8", "--memory", "20MiB"), "--memory or --gpu-memory"),
        (("--batch", "512", "--pipeline", "memory"), "--pipeline memory is for one request at a time"),
        (("--batch", "512", "--pipeline", "demand"), "leave one of them out"),
    ],
)
def test_what_is_wrong_is_said(flags: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = tpi_here("plan", "-m", MIXTRAL, "--device", "emu:t4", "--dtype", "q4", *flags, cache=tmp_path)
    assert done.returncode != 0
    assert said in done.stderr


@pytest.mark.parametrize(("model", "dtype"), [(LARGE, "q4"), (MIXTRAL, "bf16")])
def test_a_group_has_one_size_of_micro_batch_for_all_nodes(model: str, dtype: str, tmp_path: Path) -> None:
    flags = ("--batch", "64", "--prompt-tokens", "77", "--device", "emu:t4", "--link", "10 Gbit, 0.05 ms", "--json")
    asked = ("plan", "-m", model, "--dtype", dtype, *flags)
    one, two = (tpi_here(*asked, "--devices", size, cache=tmp_path) for size in ("128GiB", "128GiB,96GiB"))
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    alone, found = (json.loads(done.stdout)["batch"] for done in (one, two))
    sizes = {(node["policy"]["batch"], node["policy"]["micro_batches"]) for node in found["nodes"]}
    assert sizes == {(found["batch"], found["micro_batches"])}
    assert found["tokens_per_s"] > 1.5 * alone["tokens_per_s"]  # their memories are added up
    assert "sums" in found["nodes"][0]["layer_busy_s"]["decode"]


def test_the_policy_of_a_group_in_words(tmp_path: Path) -> None:
    flags = ("plan", "-m", LARGE, "--dtype", "q4", "--batch", "64", "--device", "emu:t4", "--devices", "64GiB,96GiB")
    near, far = (
        tpi_here(*flags, "--link", link, cache=tmp_path).stdout for link in ("10 Gbit, 0.05 ms", "1 Mbit, 1 s")
    )
    for text in ("the same on all nodes", "master, device-1: attention on the", "the roof for tokens is"):
        assert text in near
    assert "left out, because single requests are faster without them: device-1" in far


def test_four_cards_are_four_nodes(tmp_path: Path) -> None:
    """Each node has a quarter of the model and of the host, and waits for sums with the others."""
    asked = ("--pipeline", "batch", "--dtype", "bf16", "--batch", "512", "--prompt-tokens", "77", "--gen-tokens", "128")
    found = {}
    for count in (1, 4):
        cards = ("--device", "emu:t4") * count
        done = tpi_here("plan", "-m", MIXTRAL, *cards, *asked, "--json", cache=tmp_path)
        assert done.returncode == 0, done.stderr
        found[count] = json.loads(done.stdout)["batch"]
    assert found[4]["left_out"] == []
    assert [node["name"] for node in found[4]["nodes"]] == ["master", "worker-1", "worker-2", "worker-3"]
    assert 1.5 < found[4]["tokens_per_s"] / found[1]["tokens_per_s"] < 8
    done = tpi_here("plan", "-m", MIXTRAL, *("--device", "emu:t4") * 2, *asked, "--kv", "ram", cache=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "cannot count --kv" in done.stderr

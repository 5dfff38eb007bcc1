"""`tpi profile`: its output, continuing after a kill, and wrong uses."""

import json
import subprocess
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.commands import TPI, clean, run_json, tpi
from tests.support.devices.predicted import all_predictors, exact_predictors
from tests.support.models import TinyModel
from tests.support.weights.trained import TEXT, trained_facts, write_trained
from tpi.errors import ModelError, WeightsError
from tpi.kernels import open_kernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.library.hold import Hold
from tpi.pack.reader import Pack
from tpi.sparsity.examples import token_bytes
from tpi.sparsity.files import load_predictors, save_predictors
from tpi.sparsity.replay import cut_sequences
from tpi.sparsity.usage import NAME, load_profile


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    pack_model(open_source(write_trained(tmp_path / "model")), "q8", tmp_path / "pack")
    return tmp_path / "pack"


def test_a_profile_says_how_neurons_are_used(pack: Path, tmp_path: Path) -> None:
    done = tpi("profile", "-m", str(pack), "--text", str(TEXT), "--json", cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 13_000 < found["tokens"] < 14_000
    for layer, fact in zip(found["layers"], trained_facts()["layers"], strict=True):
        assert layer["active"] == pytest.approx(fact["active"], rel=0.1)
        assert layer["hot"] == pytest.approx(fact["hot"], rel=0.15)
    assert list(found["foretold"]) == ["1", "2", "3"]
    assert (pack / "profile.svg").read_text().startswith("<svg")
    assert load_profile(Path(found["profile"])).tokens == found["tokens"]
    assert found["numbering"]["path"] == str(pack / "numbered-1")
    assert found["numbering"]["runs"]["after"] < 0.8 * found["numbering"]["runs"]["before"]


def test_a_profile_that_was_stopped_goes_on(pack: Path) -> None:
    from master.profiling.measure import PIECE, profile_model
    from master.text.tokenizer import Tokenizer

    opened, kernels = Pack.open(pack), open_kernels()
    tokens = cut_sequences(Tokenizer.load(opened).encode(TEXT.read_text()), 32, 3 * PIECE)

    class Stopped(BaseException):
        """Ends the command as a kill would."""

    def stop(done: int, total: int) -> None:
        if done:
            raise Stopped

    with pytest.raises(Stopped):
        profile_model(opened, tokens, kernels, stop)
    steps: list[int] = []
    resumed = profile_model(opened, tokens, kernels, lambda done, total: steps.append(done))
    assert steps == [PIECE, 2 * PIECE, 3 * PIECE]
    (pack / NAME).unlink()
    whole = profile_model(opened, tokens, kernels, lambda done, total: None)
    assert (whole.counts == resumed.counts).all()
    assert (whole.bits == resumed.bits).all()
    other = profile_model(opened, np.flip(tokens[:PIECE], axis=0), kernels, lambda done, total: None)
    assert other.tokens == PIECE * 32  # another text begins anew


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "cannot read"), (b"\xff\xfe\x00", "not UTF-8"), (b"too short", "give --text a file of at least")],
)
def test_a_text_that_cannot_be_used(pack: Path, tmp_path: Path, content: bytes | None, says: str) -> None:
    text = tmp_path / "text"
    if content is not None:
        text.write_bytes(content)
    done = tpi("profile", "-m", str(pack), "--text", str(text), cache=tmp_path / "cache")
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_predictors_are_trained_beside_the_pack(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from master.profiling import predictors

    monkeypatch.setattr(predictors, "STEPS", 20)
    opened = Pack.open(pack)
    tokens = cut_sequences(list(range(1000)) * 2, 64)
    found = predictors.train_beside(opened, tokens, open_kernels())
    kept = load_predictors(pack / "predictors.safetensors")
    assert kept[0].ahead == 0
    assert [one["ahead"] for one in found["layers"]] == [kept[layer].ahead for layer in range(4)]
    assert (
        sum(one.nbytes for one in kept.values()) == found["share"] * opened.weight_bytes <= 0.06 * opened.weight_bytes
    )
    assert [one["rank"] for one in found["layers"]] == [kept[layer].rank for layer in range(4)]
    assert found["aim"] == 0.95
    assert found["short"] == [at for at, one in enumerate(found["layers"]) if one["recall"] < 0.95]
    assert not (pack / predictors.EXAMPLES).exists()


def test_layers_whose_predictors_fall_short_are_named() -> None:
    from master.profiling.command import _predicted

    recalls = (0.96, 0.914, 0.95, 0.5)
    layers = [{"ahead": at > 1, "rank": 8, "recall": recall, "chosen": 1.2} for at, recall in enumerate(recalls)]
    found = {"share": 0.05, "aim": 0.95, "layers": layers, "short": [1, 3]}
    assert _predicted(found)[-1].startswith(
        "predictors that find less than 95% of the active neurons: layers 1 (91.4%), 3 (50.0%). "
    )
    assert _predicted({**found, "short": []})[-1].endswith("; 2 of 4 look one layer ahead")


def test_what_memory_or_disk_have_no_room_for_is_refused(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from master.profiling import predictors

    opened, tokens = Pack.open(pack), cut_sequences(list(range(1000)), 64)
    free = 60 * token_bytes(opened)
    monkeypatch.setattr(predictors, "disk_usage", lambda path: type("", (), {"free": free}))
    with pytest.raises(WeightsError, match=r"take 1 MiB of disk .* 0 are free; free some, or give --tokens 60$"):
        predictors.train_beside(opened, tokens, open_kernels())
    monkeypatch.setattr(predictors, "default_budget", lambda: 5 << 20)
    with pytest.raises(ModelError, match=r"takes \d+ MiB of memory, and 5 are free; end other programs"):
        predictors.train_beside(opened, tokens, open_kernels())
    assert not (pack / predictors.EXAMPLES).exists()


def test_training_that_was_stopped_keeps_what_it_collected(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from master.profiling import predictors

    class Stopped(BaseException):
        """Ends the command as a kill would."""

    def stop(*words: object) -> None:
        raise Stopped

    monkeypatch.setattr(predictors, "STEPS", 1)
    opened, tokens = Pack.open(pack), cut_sequences(list(range(1000)), 64)
    with monkeypatch.context() as killed:
        killed.setattr(predictors, "train_predictors", stop)
        with pytest.raises(Stopped):
            predictors.train_beside(opened, tokens, open_kernels())
    monkeypatch.setattr("tpi.sparsity.examples.replay", stop)  # nothing is collected again
    predictors.train_beside(opened, tokens, open_kernels())
    assert load_predictors(pack / "predictors.safetensors").keys() == {0, 1, 2, 3}


def test_a_killed_profile_goes_on(pack: Path, tmp_path: Path) -> None:
    """The process is killed once its first piece is stored.

    The next run continues, and its result equals that of a whole run.
    """
    words = ["profile", "-m", str(pack), "--text", str(TEXT), "--quiet", "--json"]
    process = subprocess.Popen([*TPI, *words], env=clean(tmp_path / "cache"), stdout=subprocess.PIPE)
    with process:
        while not (pack / NAME).exists():
            with suppress(subprocess.TimeoutExpired):
                pytest.fail(f"it ended with {process.wait(0.01)} before it kept anything")
        process.kill()
    kept = load_profile(pack / NAME)
    done = tpi(*words, cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    ended = load_profile(pack / NAME)
    assert ended.of == kept.of
    assert (ended.bits[:, : kept.bits.shape[1]] == kept.bits).all()
    (pack / NAME).unlink()
    assert tpi(*words, cache=tmp_path / "cache").stdout == done.stdout
    assert (load_profile(pack / NAME).counts == ended.counts).all()


def test_neurons_are_renumbered_for_their_nodes(pack: Path, tmp_path: Path) -> None:
    """Three nodes answer as they do with the model's own numbers. A pack that a run uses is not removed."""
    save_predictors(pack / "predictors.safetensors", list(exact_predictors(Pack.open(pack)).values()))
    profiled = ("profile", "-m", str(pack), "--text", str(TEXT), "--tokens", "1024", "--split", "1,1,1")
    done = tpi(*profiled, cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert "neurons are renumbered for 3 nodes: a token's active neurons form" in done.stdout
    asked = ("-m", str(pack), "--raw", "-p", "import os", "--temp", "0", "-n", "24", "-c", "64", "--local", "2")
    dense, sparse = (
        run_json(*asked, "--sparsity", mode, cache=tmp_path / "cache")["token_ids"] for mode in ("off", "static")
    )
    assert sparse == dense
    assert (pack / "numbered-1-1-1" / ".used").exists()
    save_predictors(pack / "predictors.safetensors", list(all_predictors(Pack.open(pack)).values()))
    with closing(Hold(pack / "numbered-1-1-1")):
        done = tpi(*profiled, cache=tmp_path / "cache")
    assert done.returncode == 0
    assert "tpi: neurons get no new numbers: " in done.stderr
    assert "is in use by a running process; end it, and profile the model again" in done.stderr


def test_active_neurons_lie_on_two_cards_that_are_two_nodes(pack: Path, tmp_path: Path) -> None:
    """Each card is a node of its own, with its part of the neurons and of their predictors."""
    save_predictors(pack / "predictors.safetensors", list(exact_predictors(Pack.open(pack)).values()))
    cache = tmp_path / "cache"
    profiled = ("profile", "-m", str(pack), "--text", str(TEXT), "--tokens", "1024", "--split", "1,1")
    assert tpi(*profiled, cache=cache).returncode == 0
    asked = ("-m", str(pack), "--raw", "-p", "import os", "--temp", "0", "-n", "8", "-c", "64")
    cards = ("--device", "emu:64MiB,stretch=1,name=first", "--device", "emu:64MiB,stretch=1,name=second")
    dense = run_json(*asked, "--sparsity", "off", cache=cache)
    for mode in ("static", "dynamic"):
        sparse: Any = run_json(*asked, *cards, "--sparsity", mode, cache=cache)
        assert sparse["token_ids"] == dense["token_ids"]
        assert [node["accelerator"].split()[0] for node in sparse["nodes"]] == ["first", "second"]


@pytest.mark.parametrize(("split", "says"), [("1,x", "is neither equal"), (",".join("1" * 40), "too few for 40 nodes")])
def test_a_split_that_cannot_be_is_refused_at_once(pack: Path, tmp_path: Path, split: str, says: str) -> None:
    done = tpi("profile", "-m", str(pack), "--text", str(TEXT), "--split", split, cache=tmp_path / "cache")
    assert done.returncode == 2
    assert says in done.stderr
    assert not (pack / NAME).exists()


def test_a_model_whose_activations_are_never_0_is_refused(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    model = str(tiny_model("llama3").directory)
    done = tpi("profile", "-m", model, "--text", str(TEXT), cache=tmp_path / "cache")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"tpi: {model} needs no profile: its activations (silu) are never 0, so all of its neurons are computed; "
        "give a model with ReLU or with experts"
    )
    assert not list((tmp_path / "cache").rglob(NAME))

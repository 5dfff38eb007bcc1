"""A draft model by `--draft`: the same answer, within `--memory`, or a refusal in one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from master.options import RunOptions
from master.session import Session
from tests.support.commands import run_json, tpi_here
from tests.support.models import TinyModel
from tests.support.weights.mtp import make_mtp
from tpi.devices.options import DeviceOptions
from tpi.errors import PlanError, UsageError

FLAGS = ("-p", "Hello", "-n", "24", "--temp", "0")
MEMORY = 64 << 20


@pytest.fixture
def other_tokens(model: str, tmp_path: Path) -> str:
    """Return a copy of the model in which two tokens have exchanged ids."""
    copy = copytree(model, tmp_path / "other")
    file = copy / "tokenizer.json"
    made = json.loads(file.read_text())
    names = {number: name for name, number in made["model"]["vocab"].items()}
    made["model"]["vocab"] |= {names[70]: 71, names[71]: 70}
    file.write_text(json.dumps(made))
    return str(copy)


def _session(model: str, draft: str, cache: Path, memory: int | None = None) -> Session:
    return Session(RunOptions(model, draft=draft, cache=cache, memory=memory))


def test_a_run_with_a_draft_model_gives_the_same_answer(model: str, cache: Path) -> None:
    plain = run_json("-m", model, *FLAGS, cache=cache)
    drafted = run_json("-m", model, *FLAGS, "--draft", model, "--local", "1", cache=cache)
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["finish_reason"] == plain["finish_reason"]


def test_another_tokenizer_is_refused_with_both_names(model: str, other_tokens: str, cache: Path) -> None:
    with pytest.raises(UsageError, match="another tokenizer") as refused, _session(model, other_tokens, cache):
        pass
    assert model in str(refused.value)
    assert other_tokens in str(refused.value)


def test_an_accelerator_and_a_draft_model_with_recurrent_layers_are_refused(
    model: str, cache: Path, tiny_model: Callable[[str], TinyModel]
) -> None:
    devices = DeviceOptions(("emu:1GiB,stretch=1",))
    with (
        pytest.raises(UsageError, match="--draft has no effect"),
        Session(RunOptions(model, draft=model, cache=cache, devices=devices)),
    ):
        pass
    with pytest.raises(UsageError, match="recurrent layers"), _session(model, str(tiny_model("lfm2").directory), cache):
        pass


@pytest.mark.parametrize("family", ["mixtral", "qwen35"])
def test_a_model_with_experts_or_recurrent_layers_can_have_a_draft_model(
    family: str, model: str, cache: Path, tiny_model: Callable[[str], TinyModel]
) -> None:
    large = str(tiny_model(family).directory)
    plain = run_json("-m", large, *FLAGS, cache=cache)
    drafted = run_json("-m", large, *FLAGS, "--draft", model, cache=cache)
    assert drafted["token_ids"] == plain["token_ids"]


def test_the_layer_for_prediction_takes_what_the_plan_leaves_of_the_memory(
    model: str, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "mtp"
    make_mtp("glm4moe", directory)
    with Session(RunOptions(str(directory), cache=cache, memory=MEMORY)) as session:
        layer = session.engine.deployment.mtp
        assert layer is not None
        assert session.node.budget.total == MEMORY
        assert session.node.budget.used + layer.node.budget.used <= MEMORY
        least = session.node.budget.used
    assert "multi-token prediction takes" in capsys.readouterr().err
    with Session(RunOptions(str(directory), cache=cache, memory=least + (1 << 20))) as session:
        assert session.engine.deployment.mtp is None
        assert session.engine.deployment.drafts
    assert "multi-token prediction does not draft" in capsys.readouterr().err
    with Session(RunOptions(str(directory), cache=cache, memory=MEMORY, draft=model)) as session:
        assert session.engine.deployment.mtp is None  # the draft model takes its place


@pytest.mark.parametrize("home", [("--memory", "64MiB"), ("--devices", "2x512MiB")])
def test_a_plan_counts_the_layer_for_prediction_as_a_run_does(
    home: tuple[str, ...], model: str, cache: Path, tmp_path: Path
) -> None:
    directory, flags = tmp_path / "mtp", ("--dtype", "q4", "-c", "128")
    make_mtp("glm4moe", directory)
    with Session(RunOptions(str(directory), dtype="q4", context=128, cache=cache, memory=MEMORY)) as session:
        layer = session.engine.deployment.mtp
        assert layer is not None
        nbytes = layer.nbytes
    asked = ("plan", "-m", str(directory), *flags, *home)
    done = tpi_here(*asked, "--json", cache=cache)
    assert done.returncode == 0, done.stderr
    assert f"multi-token prediction takes {nbytes >> 20} MiB" in done.stderr
    planned = json.loads(done.stdout)
    assert planned["mtp"]["nbytes"] == pytest.approx(nbytes, rel=0.1)
    assert 0 < planned["mtp"]["seconds"] < 1 / planned["decode_tokens_per_s"]
    done = tpi_here(*asked, "--json", "--draft", model, cache=cache)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["mtp"] is None  # the draft model takes its place
    assert "multi-token" not in done.stderr


def test_the_draft_model_is_counted_within_the_memory(model: str, cache: Path) -> None:
    with _session(model, model, cache, memory=MEMORY) as session:
        taken = session.placement.draft_memory
        assert taken > 0
        assert session.node.budget.total == MEMORY - taken
        assert session.node.budget.used + taken <= MEMORY
    with pytest.raises(PlanError, match=f"--draft {model}"), _session(model, model, cache, memory=1 << 20):
        pass

"""The pack that a profile makes: renumbered neurons, hot neurons first on each node, used by runs."""

from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest

from master.deployment.numbering import numbered_for
from master.options import RunOptions
from master.profiling import numbering
from master.profiling.measure import profile_model
from master.profiling.numbering import Numbering
from master.session import Session
from master.vocabulary.sampler import Sampler, Sampling
from scheduler.demand.records import reader
from scheduler.demand.records.stats import RecordStats
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.neurons import SMALL, relu_packs
from tests.support.devices.offloading import answers, prompts
from tests.support.devices.predicted import all_predictors, exact_predictors
from tests.support.generating import generate
from tests.support.weights.trained import TEXT
from tpi.errors import WeightsError
from tpi.kernels import open_kernels
from tpi.pack.library.hold import Hold
from tpi.pack.reader import Pack
from tpi.progress import silent
from tpi.sparsity.files import NAME, load_predictors, save_predictors
from tpi.sparsity.numbered import numbered_path, open_numbered
from tpi.sparsity.predictor import Predictor
from tpi.sparsity.renumber import window
from tpi.sparsity.replay import I32, cut_sequences
from tpi.sparsity.usage import NAME as PROFILE
from tpi.sparsity.usage import load_profile
from worker.plan import records as records

TIGHT = 21_700 << 10  # bytes in which the trained model in q8, exact predictors and a context fit, all neurons do not


@pytest.fixture(scope="module")
def tokens() -> I32:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(TEXT.with_name("tokenizer.json"))).encode(TEXT.read_text()).ids
    return cut_sequences(ids, 128, 8)


@pytest.fixture(scope="module")
def whole(tokens: I32, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the trained model with predictors that are always right, and its profile."""
    made = relu_packs(tmp_path_factory.mktemp("trained"))("q8")
    save_predictors(made.path / NAME, list(exact_predictors(made).values()))
    profile_model(made, tokens, open_kernels(), silent)
    return made.path


@pytest.fixture
def pack(whole: Path, tmp_path: Path) -> Pack:
    return Pack.open(Path(copytree(whole, tmp_path / "pack")))


def profiled(pack: Pack, tokens: I32, shares: Sequence[float], cache: Path) -> Numbering:
    use = profile_model(pack, tokens, open_kernels(), silent)
    made = Numbering.of(pack, use, shares)
    made.keep(cache, silent)
    return made


@pytest.mark.parametrize("shares", [[1], [3, 2, 1]], ids=["one", "three"])
def test_neurons_are_hot_first_on_each_node(shares: list[float], pack: Pack, tokens: I32, tmp_path: Path) -> None:
    made = profiled(pack, tokens, shares, tmp_path)
    found = open_numbered(pack, made.path, tmp_path)
    found.verify()
    counts, neurons = load_profile(found.path / PROFILE).counts, pack.config.intermediate
    assert counts.sum() == made.use.counts.sum()
    ends = np.cumsum(shares) * neurons // sum(shares)
    for layer in counts:
        for first, last in zip([0, *ends[:-1]], ends, strict=True):
            run, size = layer[first:last], window(last - first)
            windows = [run[at : at + size] for at in range(0, len(run), size)]
            assert all(hot.min() >= cold.max() for hot, cold in pairwise(windows))
            assert run.sum() == pytest.approx(layer.sum() * (last - first) / neurons, rel=0.05)
    runs = made.figures()["runs"]
    assert runs["after"] < 0.9 * runs["before"]


@pytest.mark.parametrize("shares", [[1.0], [3.0, 2.0, 1.0]], ids=["one", "three"])
def test_tokens_are_those_of_the_dense_run(
    shares: list[float], pack: Pack, tokens: I32, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.neurons.judge.measure_limit", lambda *given: 1.0)
    profiled(pack, tokens, shares, tmp_path)
    found = numbered_for("static", pack, shares, tmp_path)
    assert found.path == numbered_path(pack.path, shares)
    everything = all_predictors(found)
    expected = answered(pack, tmp_path, None, shares)
    assert answered(found, tmp_path, None, shares) == expected
    assert answered(found, tmp_path, load_predictors(found.path / NAME), shares) == expected
    assert answered(found, tmp_path, everything, shares) == expected


def answered(pack: Pack, cache: Path, predictors: dict[int, Predictor] | None, shares: list[float]) -> list[list[int]]:
    mode = "off" if predictors is None else "static"
    made = in_process_deployment(pack, shares, cache, predictors=predictors, sparsity=mode, **SMALL)
    with closing(made) as deployment:
        asked = [prompts(pack.config.vocab, count, seed=count, longest=20) for count in (1, 3)]
        return [answer for some in asked for answer in answers(deployment, some, 10)]


def test_a_run_uses_it_where_neurons_are_chosen(pack: Pack, tokens: I32, tmp_path: Path) -> None:
    made = profiled(pack, tokens, [1], tmp_path)
    said = {}
    for mode, path in (("off", pack.path), ("auto", made.path), ("static", made.path)):
        options = RunOptions(str(pack.path), context=64, cache=tmp_path, sparsity=mode)  # type: ignore[arg-type]
        with Session(options) as session:
            assert session.pack.path == path
            asked = session.engine.admit([5, 6, 7])
            drawn = generate(session.engine, asked, Sampler(Sampling(temperature=0)), 20)
            said[mode] = [one.token for one in drawn]
    assert said["static"] == said["auto"] == said["off"]


def test_it_is_left_alone_where_it_is_for_other_nodes(
    pack: Pack, tokens: I32, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With two nodes, all hot neurons would be on the first. Nodes with slightly different shares may use the pack."""
    profiled(pack, tokens, [1], tmp_path)
    assert numbered_for("static", pack, [1, 1], tmp_path).path == pack.path
    assert "no other was made for these nodes; tpi profile with --split 1,1 makes one" in capsys.readouterr().err
    many = profiled(pack, tokens, [1, 1], tmp_path)
    assert numbered_for("static", pack, [1, 1], tmp_path).path == many.path
    assert numbered_for("static", pack, [12, 12.1], tmp_path).path == many.path
    assert numbered_for("static", pack, [1], tmp_path).path == numbered_path(pack.path, [1])
    assert not capsys.readouterr().err


def test_fewer_reads_fetch_what_is_wanted(
    pack: Pack, tokens: I32, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_CODE", 0)
    monkeypatch.setattr(records, "measured_gap", lambda *given: 0)
    profiled(pack, tokens, [1], tmp_path)
    before, after = (read(each, tmp_path, tokens) for each in (pack, numbered_for("static", pack, [1], tmp_path)))
    assert after.requested == pytest.approx(before.requested, rel=0.1)
    assert after.reads < 0.8 * before.reads
    assert after.read_bytes < 0.9 * before.read_bytes


def read(pack: Pack, cache: Path, tokens: I32) -> RecordStats:
    """Return the counts of reads for an answer, with memory for only some of the neurons."""
    predictors = load_predictors(pack.path / NAME)
    made = in_process_deployment(
        pack, [1.0], cache / pack.path.name, predictors=predictors, sparsity="static", memory=TIGHT,
        scheduler="window", **SMALL,
    )  # fmt: skip
    with closing(made) as deployment:
        answers(deployment, [tokens[0, :8].tolist()], 40)
        assert deployment.node.sparse is not None
        assert deployment.node.sparse.records is not None
        return deployment.node.sparse.records.stats()


def test_it_is_made_once_and_again_for_other_predictors(pack: Pack, tokens: I32, tmp_path: Path) -> None:
    made = profiled(pack, tokens, [1], tmp_path)
    first = (made.path / "manifest.json").stat().st_ino
    profiled(pack, tokens, [1], tmp_path)
    assert (made.path / "manifest.json").stat().st_ino == first
    save_predictors(pack.path / NAME, list(all_predictors(pack).values()))
    profiled(pack, tokens, [1], tmp_path)
    assert (made.path / "manifest.json").stat().st_ino != first
    assert load_predictors(made.path / NAME)[1].threshold == load_predictors(pack.path / NAME)[1].threshold


def test_what_is_in_use_is_not_replaced(pack: Pack, tokens: I32, tmp_path: Path) -> None:
    made = profiled(pack, tokens, [1], tmp_path)
    save_predictors(pack.path / NAME, list(all_predictors(pack).values()))
    with closing(Hold(made.path)), pytest.raises(WeightsError, match="in use by a running process; end it"):
        made.keep(tmp_path, silent)
    made.keep(tmp_path, silent)


def test_a_stopped_run_leaves_nothing_half_made(
    pack: Pack, tokens: I32, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(BaseException):
        """Stops the command as a kill would."""

    def stop(*_: object) -> None:
        raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(numbering, "save_orders", stop)
        with pytest.raises(Stopped):
            profiled(pack, tokens, [1], tmp_path)
    assert numbered_for("static", pack, [1], tmp_path).path == pack.path
    made = profiled(pack, tokens, [1], tmp_path)
    assert numbered_for("static", pack, [1], tmp_path).path == made.path
    assert not list(pack.path.glob(".*.partial"))


@pytest.mark.parametrize("name", [NAME, PROFILE])
def test_files_beside_the_blocks_are_made_again_too(
    name: str, pack: Pack, tokens: I32, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = profiled(pack, tokens, [1], tmp_path)
    other = profiled(pack, tokens, [1, 1], tmp_path)
    for cut in (500, 1 << 30):
        kept = (made.path / name).read_bytes()[:-cut]
        (made.path / name).unlink()
        if kept:
            (made.path / name).write_bytes(kept)
        assert numbered_for("static", pack, [1], tmp_path).path in (pack.path, other.path)
        assert numbered_for("static", pack, [1, 1], tmp_path).path == other.path  # what is sound serves
        assert "numbered-1 is not used: " in capsys.readouterr().err
        profiled(pack, tokens, [1], tmp_path)
        assert numbered_for("static", pack, [1], tmp_path).path == made.path


def test_numbers_made_with_other_predictors_are_not_used(
    pack: Pack, tokens: I32, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = profiled(pack, tokens, [1], tmp_path)
    save_predictors(pack.path / NAME, list(all_predictors(pack).values()))
    assert numbered_for("static", pack, [1], tmp_path).path == pack.path
    assert "numbered-1 is not used: the model's predictors have changed since" in capsys.readouterr().err
    profiled(pack, tokens, [1], tmp_path)
    assert numbered_for("static", pack, [1], tmp_path).path == made.path


def test_what_is_damaged_is_not_used_and_made_again(
    pack: Pack, tokens: I32, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = profiled(pack, tokens, [1], tmp_path)
    block = open_numbered(pack, made.path, tmp_path).layers[2][1]
    with block.path.open("r+b") as file:
        file.seek(block.offset("neuron"))
        file.write(b"\x00\xff" * 20)
    assert numbered_for("static", pack, [1], tmp_path).path == pack.path
    assert "is damaged; make it again with tpi profile" in capsys.readouterr().err
    profiled(pack, tokens, [1], tmp_path)
    numbered_for("static", pack, [1], tmp_path).verify()

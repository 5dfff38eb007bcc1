"""The layer for multi-token prediction computes what its specification says, and changes nothing but the speed."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from master.deployment.mtp import MtpLayer
from master.generation.engine import Engine
from master.generation.request import Request, Sampled
from master.generation.speculation import speculation
from master.generation.speculation.pace import ROWS, Gain, Pace
from master.vocabulary.sampler import Logprobs, Sampler, Sampling
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.models import VOCAB, TinyModel
from tests.support.weights.mtp import LAYERS, make_mtp, reference
from tpi.net.messages import StepEntry
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack

Told = tuple[int, Logprobs | None]
Packed = Callable[[str, bool, str], tuple[TinyModel, Pack]]
PROMPTS = [[1, *np.random.default_rng(seed).integers(3, VOCAB, 5 + 9 * seed).tolist()] for seed in range(8)]
FAMILIES = ("glm4moe", "deepseek3", "glm4moelite")
KINDS = (
    Sampling(temperature=0),
    Sampling(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=3),
    Sampling(temperature=0, repeat_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    Sampling(temperature=0.7, seed=5, bias={7: 3.0}),
)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """Models and their packs by family, by whether the layer is always right, and by dtype."""
    models, packs = dict[tuple[str, bool], TinyModel](), dict[tuple[str, bool, str], Path]()

    def get(family: str, right: bool, dtype: str) -> tuple[TinyModel, Pack]:
        if (family, right) not in models:
            models[family, right] = make_mtp(family, tmp_path_factory.mktemp(family), right)
        model = models[family, right]
        if (family, right, dtype) not in packs:
            target = packs[family, right, dtype] = tmp_path_factory.mktemp("packs") / family
            pack_model(open_source(model.directory), dtype, target)
        return model, Pack.open(packs[family, right, dtype])

    return get


@pytest.fixture(autouse=True)
def _always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft with the layer as many rows as a step may have, whether that makes it faster or not."""

    def fits(pace: Pace, plain: int, drafted: list[float], further: list[float], spent: float) -> bool:
        return plain + len(drafted) + len(further) <= ROWS

    monkeypatch.setattr(Pace, "drafts", property(lambda pace: True))
    monkeypatch.setattr(Pace, "rows", lambda pace, plain, chances: min(len(chances), ROWS - plain))
    monkeypatch.setattr(Pace, "continues", fits)
    monkeypatch.setattr(Gain, "off", property(lambda gain: False))
    monkeypatch.setattr(speculation, "look_up", lambda tokens, earlier, most: ([], 0))


def answers(engine: Engine, streams: int, between: Callable[[], None] = lambda: None) -> list[list[Told]]:
    """Run requests that begin one step after the other; return the tokens and log probabilities of each."""
    heard: list[list[Told]] = [[] for _ in range(streams)]
    asked = list[Request]()

    def sink(number: int) -> Callable[[Sampled], bool]:
        def take(sampled: Sampled) -> bool:
            heard[number].append((sampled.token, sampled.logprobs))
            return True

        return take

    for number in range(streams):
        sequence, sampler = engine.admit(PROMPTS[number], reuse=True), Sampler(KINDS[number % len(KINDS)])
        asked.append(Request(sequence, sampler, 40 - 3 * number, sink(number), logprobs=2))
        engine.submit(asked[-1])
        engine.step()
    between()
    while engine.requests:
        engine.step()
        for request in asked:
            if request.finished:
                engine.release(request.sequence)
    return heard


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_computes_what_its_specification_says(family: str, packed: Packed, tmp_path: Path) -> None:
    model, pack = packed(family, False, "f32")
    tokens = (PROMPTS[2] * 2)[:40]
    hidden, normed, logits = reference(model, tokens)
    with closing(in_process_deployment(pack, [1], tmp_path)) as deployment:
        layer, count = deployment.mtp, len(tokens) - 1
        assert layer is not None
        parts = list[np.ndarray]()
        for first in range(0, count, 13):  # the pages hold what earlier calls computed
            last = min(first + 13, count)
            entry = StepEntry(
                3, first, last - first, min(1, first), (0,) if not first else (1,) if last == count else ()
            )
            parts.append(layer.run([entry], (), tokens[first + 1 : last + 1], hidden[first:last]))
        out = np.concatenate(parts)
        np.testing.assert_allclose(layer.head.norm(out), normed, atol=1e-4)
        np.testing.assert_allclose(layer.head(out), logits, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_changes_no_other_block_of_the_pack(family: str, packed: Packed, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model, pack = packed(family, False, "q4")
    tensors = load_file(model.directory / "model.safetensors")
    for file in model.directory.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    kept = {name: value for name, value in tensors.items() if not name.startswith(f"model.layers.{LAYERS}.")}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    pack_model(open_source(tmp_path), "q4", tmp_path / "pack")
    without = Pack.open(tmp_path / "pack")
    assert not without.mtp
    assert len(pack.mtp) == 4
    assert without.manifest.layers == pack.manifest.layers
    assert (without.manifest.head, without.manifest.embedding) == (pack.manifest.head, pack.manifest.embedding)
    assert not {block.id for block in pack.walk()} & {block.id for block in pack.mtp}


@pytest.mark.parametrize(("family", "right"), [("glm4moe", True), ("glm4moe", False), ("deepseek3", True)])
@pytest.mark.parametrize(("shares", "stages"), [([1], "1"), ([2, 1, 3], "1"), ([1, 1], "2")])
@pytest.mark.parametrize("streams", [1, 4])
def test_the_layer_changes_no_answer(
    family: str, right: bool, shares: list[float], stages: str, streams: int, packed: Packed, tmp_path: Path
) -> None:
    _, pack = packed(family, right, "q4")
    with closing(in_process_deployment(pack, shares, tmp_path, stages=stages)) as deployment:
        engine = Engine(deployment)
        engine.drafts = False
        expected = answers(engine, streams)
        engine = Engine(deployment)
        assert answers(engine, streams) == expected
        drafted, accepted = engine.speculation.drafted["mtp"], engine.speculation.accepted["mtp"]
        if stages != "1" and streams > 1:
            return  # each stage has steps of other requests, so nothing is drafted
        assert drafted > 0
        assert (accepted == drafted) == (right and streams == 1)
        assert (accepted > 0) or not right


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("streams", [1, 2])
def test_drafts_may_be_steps_of_their_own(
    right: bool, streams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several stages, the layer continues drafted tokens whose hidden states are not known yet."""
    pack_model(open_source(make_mtp("glm4moe", tmp_path / "model", right, layers=4).directory), "q4", tmp_path / "pack")
    with closing(in_process_deployment(Pack.open(tmp_path / "pack"), [1] * 4, tmp_path, stages="4")) as deployment:
        engine = Engine(deployment)
        engine.drafts = False
        expected = answers(engine, streams)
        monkeypatch.setattr(Pace, "runs_ahead", lambda *_: True)
        monkeypatch.setattr(Pace, "most_ahead", lambda pace, most: most)
        engine = Engine(deployment)
        assert answers(engine, streams) == expected
        assert engine.speculation.drafted["mtp"] > 0
        assert (engine.speculation.accepted["mtp"] > 10) == right


def test_requests_that_are_preempted_are_drafted_for_again(packed: Packed, tmp_path: Path) -> None:
    _, pack = packed("glm4moe", True, "f32")
    with closing(in_process_deployment(pack, [1], tmp_path, pool=9)) as deployment:
        engine = Engine(deployment)
        engine.drafts = False
        expected = answers(engine, 8)
        assert engine.admission.preempted
        engine = Engine(deployment)
        assert answers(engine, 8) == expected
        assert engine.admission.preempted
        assert engine.speculation.accepted["mtp"] > 0


def test_drafts_go_on_after_the_deployment_is_replaced(packed: Packed, tmp_path: Path) -> None:
    _, pack = packed("glm4moe", True, "q4")
    with closing(in_process_deployment(pack, [1], tmp_path)) as one:
        engine = Engine(one)
        engine.drafts = False
        expected = answers(engine, 2)
        with closing(in_process_deployment(pack, [1], tmp_path / "other", epoch=2)) as other:
            engine = Engine(one)
            assert answers(engine, 2, lambda: engine.replace(other)) == expected
            assert engine.deployment is other
            assert engine.speculation.accepted["mtp"] > 0


def test_a_further_turn_reuses_the_rows_of_its_prefix(packed: Packed, tmp_path: Path) -> None:
    _, pack = packed("glm4moe", False, "q4")
    with closing(in_process_deployment(pack, [1], tmp_path)) as deployment:
        engine = Engine(deployment)
        turn = [*PROMPTS[0], *(token for token, _ in answers(engine, 1)[0]), 5, 6, 7]

        def told() -> list[int]:
            heard = list[int]()

            def take(sampled: Sampled) -> bool:
                heard.append(sampled.token)
                return True

            sequence = engine.admit(turn, reuse=True)
            engine.submit(Request(sequence, Sampler(KINDS[0]), 10, take))
            while engine.requests:
                engine.step()
            assert sequence.cached
            engine.release(sequence)
            return heard

        before = engine.speculation.drafted["mtp"]
        found = told()
        assert engine.speculation.drafted["mtp"] > before
        engine.drafts = False
        assert told() == found


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows in each call of the layer."""
    found, run = list[int](), MtpLayer.run

    def counted(layer: MtpLayer, entries: Sequence[StepEntry], *more: Any) -> Any:
        found.append(sum(entry.count for entry in entries))
        return run(layer, entries, *more)

    monkeypatch.setattr(MtpLayer, "run", counted)
    return found


def test_the_layer_computes_nothing_while_it_is_not_to_draft(
    packed: Packed, tmp_path: Path, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards it drafts for an answer in progress, from the latest rows on."""
    _, pack = packed("glm4moe", True, "q4")
    off, made, resumed = True, 60, 50
    monkeypatch.setattr(Gain, "off", property(lambda gain: off))
    with closing(in_process_deployment(pack, [1], tmp_path)) as deployment:
        engine = Engine(deployment)
        engine.drafts = False
        plain = Request(engine.admit(PROMPTS[2]), Sampler(KINDS[0]), made, lambda sampled: True)
        drafted = Request(engine.admit(PROMPTS[2]), Sampler(KINDS[0]), made, lambda sampled: True)
        engine.submit(plain)
        while engine.requests:
            engine.step()
        engine.drafts = True
        engine.submit(drafted)
        while drafted.made < resumed:
            engine.step()
        assert not rows
        off = False
        while engine.requests:
            engine.step()
        assert drafted.sequence.tokens == plain.sequence.tokens
        assert drafted.drafts.made == drafted.drafts.right > 0
        assert 0 < sum(rows) <= 2 * (made - resumed)  # each row as a draft, and once more with hidden states


def test_the_layer_rests_if_it_is_not_asked_for_drafts(
    packed: Packed, tmp_path: Path, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps of other requests in all stages, nothing is drafted; a later request alone is drafted for again."""
    _, pack = packed("glm4moe", True, "q4")
    idle = 8
    monkeypatch.setattr(speculation, "_IDLE", idle)
    monkeypatch.setattr(Pace, "runs_ahead", lambda *_: False)
    with closing(in_process_deployment(pack, [1, 1], tmp_path, stages="2")) as deployment:
        engine, ended = Engine(deployment), 0
        asked = [Request(engine.admit(PROMPTS[at]), Sampler(KINDS[0]), 40, lambda sampled: True) for at in range(4)]
        for request in asked:
            engine.submit(request)
        while not any(request.finished for request in asked):
            engine.step()
            ended = len(rows) if min(request.made for request in asked) <= 2 * idle else ended
        assert len(rows) == ended
        while engine.requests:
            engine.step()
        last = Request(engine.admit(PROMPTS[5]), Sampler(KINDS[0]), 40, lambda sampled: True)
        engine.submit(last)
        while engine.requests:
            engine.step()
        assert last.drafts.right > 0

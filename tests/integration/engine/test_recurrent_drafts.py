"""Drafts of models with recurrent layers: states go back to the last right token, and answers stay the same."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from master.deployment.assignments import assignments
from master.deployment.stages import one_stage
from master.generation.engine import Engine
from master.generation.request import Request
from master.generation.speculation import speculation
from master.generation.speculation.pace import Pace
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.cluster.inprocess import in_process_deployment, in_process_engine
from tests.support.models import RECURRENT
from tests.support.speculating import PROMPTS, Heard, Oracle, Told, answers, draft_always, samplers
from tpi.block import recurrent_spec
from tpi.config import RECURRENT as RECURRENT_KINDS
from tpi.kernels.kv import states_for
from tpi.kernels.spec import PAGE_TOKENS
from tpi.net.messages import NodeOptions, PeerAddress
from tpi.pack.reader import Pack
from worker.node_plan import node_plan
from worker.plan.fit import need

Packs = Callable[..., Pack]
KINDS = ("qwen35", "lfm2", "granite4hmoe", "nemotronh")  # with states of each kind
SEVERAL = pytest.mark.parametrize("family", KINDS)


@pytest.fixture(autouse=True)
def _always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)


def unchanged(engine: Engine, streams: int, right: float, monkeypatch: pytest.MonkeyPatch) -> list[list[Told]]:
    """Check that drafts, of which the share `right` is right, change no answer; return the answers."""
    engine.drafts = False
    expected = answers(engine, samplers(streams))
    monkeypatch.setattr(speculation, "look_up", Oracle(expected, right))
    engine.drafts = True
    assert answers(engine, samplers(streams)) == expected
    drafted, accepted = engine.speculation.drafted["lookup"], engine.speculation.accepted["lookup"]
    assert drafted > 0
    assert 0 < accepted < drafted if right == 0.5 else accepted == right * drafted
    assert engine.deployment.pages.free == engine.deployment.pages.total
    return expected


@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.parametrize(
    ("right", "shares", "streams", "dtype"),
    [(0.5, [1], 1, "f32"), (0.0, [1], 4, "q4"), (1.0, [2, 1, 3], 1, "q4"), (0.5, [2, 1, 3], 4, "f32")],
)
def test_drafts_change_no_answer(
    family: str,
    right: float,
    shares: list[float],
    streams: int,
    dtype: str,
    tiny_pack: Packs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with in_process_engine(tiny_pack(family, dtype), shares, tmp_path, chunk=16) as engine:
        unchanged(engine, streams, right, monkeypatch)


@pytest.mark.parametrize(("family", "right"), [*zip(KINDS, (0.0, 0.5, 1.0, 0.5), strict=True)])
def test_drafts_in_several_stages_are_rows_of_one_step(
    family: str, right: float, tiny_pack: Packs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let TPI believe that drafts would be faster as steps of their own: these families still use rows of one step."""
    monkeypatch.setattr(Pace, "runs_ahead", lambda *_: True)
    with closing(in_process_deployment(tiny_pack(family), [1, 1], tmp_path, stages="2")) as deployment:
        unchanged(Engine(deployment), 1, right, monkeypatch)


@SEVERAL
def test_preempted_requests_go_on_as_without_drafts(
    family: str, tiny_pack: Packs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_process_engine(tiny_pack(family), [1, 2], tmp_path, pool=3) as engine:
        unchanged(engine, 4, 0.5, monkeypatch)
        assert engine.admission.preempted


def _told(engine: Engine, prompt: list[int], count: int, after: Callable[[int], None] = lambda step: None) -> Request:
    """Run a greedy request; call `after` with the number of each step."""
    heard = Heard()
    request = Request(engine.admit(prompt, reuse=True), Sampler(Sampling(temperature=0)), count, heard.sink)
    engine.submit(request)
    step = 0
    while not request.finished:
        engine.step()
        step += 1
        after(step)
    engine.release(request.sequence)
    return request


class Copied:
    """A drafter of the tokens of a known text, of which it changes one in three."""

    def __init__(self, text: list[int]) -> None:
        self._text = text

    def __call__(self, tokens: list[int], earlier: object, most: int) -> tuple[list[int], int]:
        coming = self._text[len(tokens) :][:most]
        return [token if (len(tokens) + at) % 3 else token + 1 for at, token in enumerate(coming, 1)], 8


@SEVERAL
def test_a_prefix_is_found_as_without_drafts(
    family: str, tiny_pack: Packs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer crosses the ends of two pages while drafts are in a step."""
    found = list[tuple[list[int], int | None]]()
    for drafts in (False, True):
        with in_process_engine(tiny_pack(family), [1], tmp_path, pool=100, chunk=64) as engine:
            engine.drafts = drafts
            if drafts:
                monkeypatch.setattr(speculation, "look_up", Copied(found[0][0]))
            first = _told(engine, PROMPTS[2], 50)
            again = _told(engine, [*first.sequence.tokens[:-1], 9, 8, 7], 12)
            assert bool(engine.speculation.accepted.total()) == drafts
            found += [(list(each.sequence.tokens), each.sequence.cached) for each in (first, again)]
    assert found[:2] == found[2:]
    assert found[1][1] == 2 * PAGE_TOKENS


@SEVERAL
def test_a_new_deployment_goes_on_in_the_middle_of_drafts(
    family: str, tiny_pack: Packs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace the deployment while drafts are made, as the loss of a worker does."""
    pack = tiny_pack(family)
    with in_process_engine(pack, [1, 2], tmp_path) as engine, in_process_engine(pack, [1], tmp_path) as other:
        engine.drafts = False
        expected = list(_told(engine, PROMPTS[1], 40).sequence.tokens)
        monkeypatch.setattr(speculation, "look_up", Copied(expected))
        engine.drafts = True
        replaced = []

        def after(step: int) -> None:
            if step == 6:
                replaced.append(engine.speculation.accepted.total())
                engine.replace(other.deployment)

        assert list(_told(engine, PROMPTS[1], 40, after).sequence.tokens) == expected
        assert 0 < replaced[0] < engine.speculation.accepted.total()


@SEVERAL
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_states_with_the_inputs_of_later_tokens_are_counted_in_the_memory(
    family: str, rank: int, tiny_pack: Packs, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, pages = tiny_pack(family), 48
    peers = [PeerAddress(number, f"node {number}", "here:1") for number in range(3)]
    dealt = assignments(pack, one_stage(pack, [1, 2, 1]), peers, NodeOptions(128, pages, "f32", 16), 1, 1)
    plan = node_plan(dealt[rank])
    counted, one = need(plan), 4 * sum(plan.state_sizes.values())
    for block in plan.blocks:
        if block.kind in RECURRENT_KINDS:
            units = [(run.layout, run.units) for run in block.runs]
            spec = recurrent_spec(pack.config, units, pack.layers[block.layer][0].vectors())
            assert plan.state_sizes[block.layer] == spec.state_values
    monkeypatch.setattr(type(plan), "state_sizes", {})
    without = need(replace(plan))
    held = counted.fixed - without.fixed + pages * (counted.page_bytes - without.page_bytes)
    assert one > 0
    assert 0 <= held - one * states_for(pages) <= pages

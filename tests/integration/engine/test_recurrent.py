"""Models with recurrent layers in the engine: any split, any cut of a prompt, and cached states."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from master.deployment.assignments import assignments
from master.deployment.planner import deal_shards, units_of
from master.deployment.stages import one_stage
from master.generation.engine import Engine
from master.generation.sequence import Sequence
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.cluster.inprocess import in_process_deployment, in_process_engine
from tests.support.generating import generate, together
from tests.support.models import RECURRENT, VOCAB, TinyModel, reference_logits
from tpi.errors import PlanError
from tpi.net.fields import Card
from tpi.net.messages import NodeOptions, PeerAddress
from tpi.pack.reader import Pack
from worker.plan.checks import check_assign

TOKENS = [1, *np.random.default_rng(5).integers(3, VOCAB, 36).tolist()]
LONG = [1, *np.random.default_rng(6).integers(3, VOCAB, 98).tolist()]
Packs = Callable[..., Pack]
SEVERAL = pytest.mark.parametrize("family", ["qwen35", "lfm2", "granite4hmoe", "nemotronh"])  # with states of each kind
GREEDY = Sampler(Sampling(temperature=0))


def answer(engine: Engine, tokens: list[int], count: int) -> tuple[list[int], Sequence]:
    """Return greedy tokens after a prompt that may reuse cached states; release the sequence."""
    sequence = engine.admit(tokens, reuse=True)
    made = [sampled.token for sampled in generate(engine, sequence, GREEDY, count)]
    engine.release(sequence)
    return made, sequence


@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.parametrize("shares", [[1], [2, 1], [1, 0, 3], [1, 3, 2]])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_any_split_and_chunk_equals_transformers(
    family: str,
    shares: list[float],
    chunk: int,
    tiny_model: Callable[[str], TinyModel],
    tiny_pack: Packs,
    tmp_path: Path,
) -> None:
    with in_process_engine(tiny_pack(family), shares, tmp_path, chunk=chunk) as engine:
        logits = engine.logits(TOKENS)
    assert np.abs(logits - reference_logits(tiny_model(family), TOKENS)).max() < 2e-4


@SEVERAL
def test_sequences_of_mixed_lengths_keep_their_own_states(family: str, tiny_pack: Packs, tmp_path: Path) -> None:
    prompts = [LONG[:21], LONG[21:26], LONG[26:60], LONG[60:61]]

    def greedy(step: list[list[int]]) -> list[list[int]]:
        with in_process_engine(tiny_pack(family), [1, 1], tmp_path, pool=100) as engine:
            return together(engine, step, 70)

    assert greedy(prompts) == [greedy([prompt])[0] for prompt in prompts]


@pytest.mark.parametrize("shares", [[1], [1, 2]])
@SEVERAL
def test_a_prompt_continues_from_the_last_kept_state(
    family: str, tiny_pack: Packs, tmp_path: Path, shares: list[float]
) -> None:
    with in_process_engine(tiny_pack(family), shares, tmp_path, pool=100, chunk=64) as engine:
        made, first = answer(engine, LONG[:60], 20)
        assert first.cached == 0
        further = [*LONG[:60], *made, *TOKENS[:9]]
        again, second = answer(engine, further, 6)
        assert second.cached == 64  # the state at the end of the answer's last whole page
        other, third = answer(engine, [*LONG[:60], *TOKENS[:20]], 6)
        assert third.cached == 0  # the state after 64 tokens belongs to other tokens
    for prompt, found in ((further, again), ([*LONG[:60], *TOKENS[:20]], other)):
        with in_process_engine(tiny_pack(family), shares, tmp_path, pool=100, chunk=64) as engine:
            assert answer(engine, prompt, 6)[0] == found


def test_a_prompt_in_chunks_keeps_the_states_between_them(tiny_pack: Packs, tmp_path: Path) -> None:
    with in_process_engine(tiny_pack("qwen3next"), [1], tmp_path, pool=100, chunk=40) as engine:
        answer(engine, LONG[:90], 2)
        found, second = answer(engine, [*LONG[:80], 5, 6, 7], 6)
        assert second.cached == 64
    with in_process_engine(tiny_pack("qwen3next"), [1], tmp_path, pool=100, chunk=40) as engine:
        assert answer(engine, [*LONG[:80], 5, 6, 7], 6)[0] == found


@SEVERAL
def test_a_truncated_sequence_goes_back_to_a_kept_state(family: str, tiny_pack: Packs, tmp_path: Path) -> None:
    with in_process_engine(tiny_pack(family), [1], tmp_path, pool=100, chunk=32) as engine:
        sequence = engine.admit(LONG[:90])
        list(generate(engine, sequence, GREEDY, 3))
        sequence.truncate(engine.deployment.pages, 50)
        assert sequence.computed == 32
        made = [sampled.token for sampled in generate(engine, sequence, GREEDY, 6)]
        assert made == answer(engine, LONG[:50], 6)[0]


@SEVERAL
def test_a_new_deployment_computes_the_states_again(family: str, tiny_pack: Packs, tmp_path: Path) -> None:
    pack = tiny_pack(family)
    with in_process_engine(pack, [1, 1], tmp_path) as engine, in_process_engine(pack, [1], tmp_path) as other:
        sequence = engine.admit(LONG[:40])
        begun = [sampled.token for sampled in generate(engine, sequence, GREEDY, 5)]
        engine.replace(other.deployment)
        rest = [sampled.token for sampled in generate(engine, sequence, GREEDY, 5)]
        whole = answer(other, LONG[:40], 10)[0]
    assert [*begun, *rest] == whole


@pytest.mark.parametrize("family", RECURRENT)
def test_three_nodes_that_stream_equal_transformers(
    family: str, tiny_model: Callable[[str], TinyModel], tiny_pack: Packs, tmp_path: Path
) -> None:
    """With the paper's window, the weights of every block are read again in each step."""
    made = in_process_deployment(tiny_pack(family), [3, 2, 1], tmp_path, scheduler="window", window=1)
    with closing(made) as deployment:
        logits = Engine(deployment).logits(TOKENS)
    assert np.abs(logits - reference_logits(tiny_model(family), TOKENS)).max() < 2e-4


@SEVERAL
def test_a_worker_with_a_card_takes_its_part(family: str, tiny_pack: Packs) -> None:
    """The card of this worker is not used, so the master must not refuse the plan because of it."""
    pack, peers = tiny_pack(family), [PeerAddress(rank, f"node {rank}", "here:1") for rank in range(2)]
    options = NodeOptions(128, 16, "f32", 16, memory=1 << 30)
    assigned = assignments(pack, one_stage(pack, [1, 1]), peers, options, 1, 1)
    check_assign(assigned[1], Card("card", 8 << 30, "auto", "auto", "auto", 0))


def test_more_nodes_than_units_are_refused(tiny_pack: Packs) -> None:
    pack = tiny_pack("lfm2")
    with pytest.raises(PlanError, match="3 units of recurrent layers, too few for 4 nodes"):
        deal_shards(pack.config, units_of(pack), [1, 1, 1, 1])

"""The engine against transformers: every family, split over nodes, in chunks, token by token, in one process."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from allreduce.algorithms.loopback import Loopback
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.cluster.inprocess import CONTEXT, in_process_engine
from tests.support.generating import generate, together
from tests.support.models import MODELS, VOCAB, TinyModel, reference_logits
from tpi.errors import UsageError
from tpi.pack.reader import Pack

TOKENS = [1, *np.random.default_rng(5).integers(3, VOCAB, 36).tolist()]
LONG = [1, *np.random.default_rng(6).integers(3, VOCAB, 98).tolist()]
TOLERANCE = 1e-4


@pytest.mark.parametrize("family", MODELS)
def test_logits_of_every_family_sharded_in_three(
    family: str, tiny_model: Callable[[str], TinyModel], tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    with in_process_engine(tiny_pack(family), [1, 1, 1], tmp_path) as engine:
        logits = engine.logits(TOKENS)
    assert np.abs(logits - reference_logits(tiny_model(family), TOKENS)).max() < TOLERANCE


@pytest.mark.parametrize("shares", [[1], [1, 1], [3, 0, 1], [1, 2, 3], [5, 1, 1, 1], [1] * 5])
def test_any_split_gives_the_same_logits(
    shares: list[float], tiny_model: Callable[[str], TinyModel], tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    with in_process_engine(tiny_pack("llama"), shares, tmp_path) as engine:
        logits = engine.logits(TOKENS)
    assert np.abs(logits - reference_logits(tiny_model("llama"), TOKENS)).max() < TOLERANCE


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("shares", [[1], [1, 2]])
def test_a_long_step_in_two_lanes_gives_the_same_logits(
    family: str,
    shares: list[float],
    tiny_model: Callable[[str], TinyModel],
    tiny_pack: Callable[..., Pack],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Loopback, "overlaps", True)
    with in_process_engine(tiny_pack(family), shares, tmp_path, chunk=128) as engine:
        logits = engine.logits(LONG)
        loop, config = engine.deployment.node.loop, tiny_pack(family).config
        blocks, exchanges = sum(not each.sums_with_next for each in loop.blocks), loop.group.stats.exchanges
        heads = 2 * config.layers if config.whole_norms and len(shares) > 1 else 0
    assert exchanges == 2 * blocks + heads  # norms over all heads are sums of their own
    assert np.abs(logits - reference_logits(tiny_model(family), LONG)).max() < TOLERANCE


def test_sequences_that_share_two_lanes_do_not_see_each_other(
    tiny_pack: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is cut into lanes at any token: in the middle of a prompt, or between two prompts."""
    monkeypatch.setattr(Loopback, "overlaps", True)
    prompts = [LONG[:21], LONG[21:26], LONG[26:90]]

    def greedy(step: list[list[int]]) -> list[list[int]]:
        with in_process_engine(tiny_pack("mistral"), [1, 1], tmp_path, chunk=128) as engine:
            return together(engine, step, 100)

    assert greedy(prompts) == [greedy([prompt])[0] for prompt in prompts]


def test_decoding_equals_prefill(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    with in_process_engine(tiny_pack("qwen2"), [1, 1], tmp_path, chunk=7) as engine:
        sequence = engine.admit(TOKENS[:5])
        made = [sampled.token for sampled in generate(engine, sequence, Sampler(Sampling(temperature=0)), 40)]
        engine.release(sequence)
        logits = engine.logits([*TOKENS[:5], *made])
    assert [int(row.argmax()) for row in logits[4:-1]] == made


def test_a_node_alone_runs_a_short_step_in_one_call(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    """A prompt reports progress block by block. A single token is computed in one call, with the same result."""
    with in_process_engine(tiny_pack("gemma2"), [1], tmp_path, chunk=64) as engine:
        loop, heard, engine.drafts = engine.deployment.node.loop, list[int](), False
        loop.on_block = lambda: heard.append(loop.progress)
        sequence = engine.admit(TOKENS[:17])
        made = [sampled.token for sampled in generate(engine, sequence, Sampler(Sampling(temperature=0)), 9)]
        blocks = len(loop.blocks)
        assert heard == [*range(1, blocks + 1), *(blocks * step for step in range(2, 10))]
        engine.release(sequence)
        logits = engine.logits([*TOKENS[:17], *made])
    assert [int(row.argmax()) for row in logits[16:-1]] == made


def test_sequences_in_one_step_do_not_see_each_other(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    prompts = [TOKENS[:9], TOKENS[9:14], TOKENS[14:33]]

    def greedy(step: list[list[int]]) -> list[list[int]]:
        with in_process_engine(tiny_pack("mistral"), [1, 1], tmp_path) as engine:
            return together(engine, step, 40)

    assert greedy(prompts) == [greedy([prompt])[0] for prompt in prompts]


def test_a_further_turn_computes_only_what_is_new(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    with in_process_engine(tiny_pack("llama"), [1, 1], tmp_path) as engine:
        greedy = Sampler(Sampling(temperature=0))
        first = engine.admit(LONG[:40])
        made = [sampled.token for sampled in generate(engine, first, greedy, 4)]
        engine.release(first)
        further = [*LONG[:40], *made, *TOKENS[:20]]
        second = engine.admit(further, reuse=True)
        continued = [sampled.token for sampled in generate(engine, second, greedy, 4)]
        assert second.cached == 43  # the last token that was drawn was not computed
        fresh = engine.admit(further)
        assert continued == [sampled.token for sampled in generate(engine, fresh, greedy, 4)]
        assert fresh.cached is None


def test_generation_ends_at_the_context(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    with in_process_engine(tiny_pack("llama"), [1], tmp_path) as engine:
        sequence = engine.admit([1] * (CONTEXT - 3))
        assert len(list(generate(engine, sequence, Sampler(Sampling(temperature=0)), 100))) == 3
        with pytest.raises(UsageError, match="over the context of 128"):
            engine.admit([1] * CONTEXT)
        with pytest.raises(UsageError, match="empty"):
            engine.admit([])

"""Families that differ from others in few settings, with any split over nodes and any cut of a prompt."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from master.generation.engine import Engine
from master.generation.request import Request
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.cluster.inprocess import in_process_deployment, in_process_engine
from tests.support.entries import ENTRIES, ORDERS
from tests.support.generating import generate, together
from tests.support.models import RECURRENT, VOCAB, TinyModel, reference_logits
from tpi.pack.reader import Pack

TOKENS = [1, *np.random.default_rng(5).integers(3, VOCAB, 36).tolist()]
LONG = [1, *np.random.default_rng(6).integers(3, VOCAB, 98).tolist()]
TOLERANCE = 1e-4
GREEDY = Sampler(Sampling(temperature=0))
GEMMA4 = ("gemma4", "gemma4moe", "gemma4e")
LATENT = ("deepseek3", "glm4moelite")
Packs = Callable[..., Pack]


@pytest.mark.parametrize("family", ENTRIES)
@pytest.mark.parametrize(("shares", "chunk"), [([1], 1), ([1], 64), ([3, 1, 2], 7), ([1, 0, 3], 1)])
def test_any_split_and_chunk_equals_transformers(
    family: str,
    shares: list[float],
    chunk: int,
    tiny_model: Callable[[str], TinyModel],
    tiny_pack: Callable[..., Pack],
    tmp_path: Path,
) -> None:
    with in_process_engine(tiny_pack(family), shares, tmp_path, chunk=chunk) as engine:
        logits = engine.logits(TOKENS)
    assert np.abs(logits - reference_logits(tiny_model(family), TOKENS)).max() < TOLERANCE


def answer(engine: Engine, tokens: list[int], count: int) -> tuple[list[int], int | None]:
    """Return greedy tokens after a prompt, and the number of the prompt's tokens that were found in the cache."""
    sequence = engine.admit(tokens, reuse=True)
    made = [sampled.token for sampled in generate(engine, sequence, GREEDY, count)]
    engine.release(sequence)
    return made, sequence.cached


@pytest.mark.parametrize("family", ORDERS)
def test_three_nodes_that_stream_every_block(
    family: str, tiny_model: Callable[[str], TinyModel], tiny_pack: Packs, tmp_path: Path
) -> None:
    made = in_process_deployment(tiny_pack(family), [3, 2, 1], tmp_path, scheduler="window", window=1)
    with closing(made) as deployment:
        logits = Engine(deployment).logits(TOKENS)
        assert deployment.node.streamed.read_bytes > 0
    assert np.abs(logits - reference_logits(tiny_model(family), TOKENS)).max() < TOLERANCE


@pytest.mark.parametrize("family", [*ENTRIES, *GEMMA4])
def test_sequences_of_mixed_lengths(family: str, tiny_pack: Packs, tmp_path: Path) -> None:
    prompts = [LONG[:21], LONG[21:26], LONG[26:60], LONG[60:61]]

    def greedy(step: list[list[int]]) -> list[list[int]]:
        with in_process_engine(tiny_pack(family), [1, 2], tmp_path, pool=100) as engine:
            return together(engine, step, 70)

    assert greedy(prompts) == [greedy([prompt])[0] for prompt in prompts]


@pytest.mark.parametrize("family", [*ENTRIES, *GEMMA4, *LATENT])
def test_a_prompt_reuses_pages_and_survives_a_lost_worker(family: str, tiny_pack: Packs, tmp_path: Path) -> None:
    pack = tiny_pack(family)
    with in_process_engine(pack, [1], tmp_path) as engine:
        expected = answer(engine, LONG[:80], 10)[0]
    with in_process_engine(pack, [2, 1], tmp_path) as engine, in_process_engine(pack, [1], tmp_path) as other:
        answer(engine, LONG[:70], 2)
        assert answer(engine, LONG[:80], 10) == (expected, 70)
        sequence = engine.admit(LONG[:80])
        begun = [sampled.token for sampled in generate(engine, sequence, GREEDY, 4)]
        engine.replace(other.deployment)
        assert [*begun, *(sampled.token for sampled in generate(engine, sequence, GREEDY, 6))] == expected


@pytest.mark.parametrize("family", [*ENTRIES, *GEMMA4, *LATENT, *RECURRENT])
def test_preempted_requests_end_as_if_they_were_alone(family: str, tiny_pack: Packs, tmp_path: Path) -> None:
    """There are too few pages for both requests, so one of them is computed again."""
    prompts = [LONG[:40], LONG[40:80]]
    with in_process_engine(tiny_pack(family), [1, 1], tmp_path, pool=4, chunk=64) as engine:
        engine.drafts = False  # both grow by a token at a time
        sequences = [engine.admit(prompt) for prompt in prompts]
        requests = [Request(sequence, GREEDY, 40, lambda sampled: True) for sequence in sequences]
        for request in requests:
            engine.submit(request)
        while engine.requests:
            engine.step()
            for request in requests:
                if request.finished:
                    engine.release(request.sequence)
        assert engine.admission.preempted
        found = [list(sequence.tokens) for sequence in sequences]
    for prompt, tokens in zip(prompts, found, strict=True):
        with in_process_engine(tiny_pack(family), [1, 1], tmp_path, pool=4, chunk=64) as engine:
            assert tokens == [*prompt, *answer(engine, prompt, 40)[0]]

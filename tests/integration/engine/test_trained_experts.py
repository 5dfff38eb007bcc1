"""The trained mixture of experts: its routing is that of transformers, predicted, and cached by policy."""

from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from master.generation.engine import Engine
from master.profiling.routing import record_routing, routing_figures
from master.vocabulary.sampler import Sampler, Sampling
from scheduler.demand.choice.cliff import DEFAULT_POLICY
from scheduler.demand.choice.replay import replay
from scheduler.demand.choice.select import ROBUST_POLICY, recording_of_experts, select
from scheduler.demand.policies import PolicyChoice
from scheduler.storage.disk import DirectDisk
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.generating import generate
from tests.support.weights.trained import MIXTURE, UNSEEN, trained_facts, write_trained
from tpi.kernels import open_kernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.progress import silent
from tpi.sparsity.replay import I32, cut_sequences
from worker.node.node import Node

LENGTH, PROMPT, MADE = 96, 32, 16  # tokens
JUDGED = 6144  # tokens over which policies are compared
STAGING = 48 << 10  # bytes that a reader of small slices reads through


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trained(tmp_path_factory.mktemp("mixture") / "model", MIXTURE)


@pytest.fixture(scope="module")
def pack(directory: Path) -> Pack:
    pack_model(open_source(directory), "f32", directory.parent / "f32")
    return Pack.open(directory.parent / "f32")


@pytest.fixture(scope="module")
def pieces(directory: Path) -> I32:
    """Return pieces of text that the model was not trained on, `[pieces, LENGTH]`."""
    from tokenizers import Tokenizer

    return cut_sequences(Tokenizer.from_file(str(directory / "tokenizer.json")).encode(UNSEEN.read_text()).ids, LENGTH)


def generated(engine: Engine, prompt: Sequence[int]) -> list[int]:
    sequence = engine.admit(prompt)
    made = [one.token for one in generate(engine, sequence, Sampler(Sampling(temperature=0)), MADE)]
    engine.release(sequence)
    return made


def expert_bytes(node: Node) -> int:
    kinds = node._residence.kinds
    return sum(size for size, kind in zip(node.budget.placement.sizes, kinds, strict=True) if kind == "ffn")


def test_tokens_and_experts_equal_transformers(directory: Path, pack: Pack, pieces: I32, tmp_path: Path) -> None:
    """On one node, on three uneven nodes, and with memory for a quarter of the experts of each."""
    import torch
    import transformers

    model = transformers.OlmoeForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompt = pieces[3, :PROMPT].tolist()
    with torch.inference_mode():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=MADE, do_sample=False, eos_token_id=None)
        seen = model(torch.from_numpy(pieces[:1].astype(np.int64)), output_router_logits=True)
    expected = ids[0, PROMPT:].tolist()
    for shares in ([1.0], [3.0, 2.0, 1.0]):
        with closing(in_process_deployment(pack, shares, tmp_path)) as deployment:
            assert generated(Engine(deployment), prompt) == expected
            found = Engine(deployment).logits(pieces[0].tolist())
            memory = deployment.node.budget.used - 3 * expert_bytes(deployment.node) // 4 + STAGING
        logits = seen.logits[0].numpy()
        np.testing.assert_allclose(found, logits, atol=1e-4 * np.abs(logits).max())
    disk = DirectDisk(threads=1)
    made = in_process_deployment(pack, shares, tmp_path, scheduler="window", memory=memory, disk=disk)
    with closing(made) as deployment:
        fetched = deployment.node.fetched
        assert fetched is not None
        assert fetched.cache.capacity <= len(fetched.cache._number) // 3
        assert generated(Engine(deployment), prompt) == expected
        assert 0.1 < fetched.cache.stats().hit_rate < 1
    chosen = np.stack([layer.topk(2).indices.numpy() for layer in seen.router_logits], axis=1)
    own = record_routing(pack, pieces[:1], open_kernels(), silent).experts
    assert np.array_equal(np.sort(own, axis=2), np.sort(chosen, axis=2))


def test_a_policy_finds_more_than_lru_in_recorded_routing(pack: Pack, pieces: I32, tmp_path: Path) -> None:
    found = routing_figures(record_routing(pack, pieces[:6], open_kernels(), silent))
    for held in found["held"][1:]:  # a quarter and half of the experts; an eighth is one token's
        assert held["lru"] <= held["found"] <= held["belady"] < 1
    assert found["held"][1]["found"] > 0.4
    even = 2 / 16
    assert max(layer["most_used"] for layer in found["layers"]) > 2 * even  # favourites, as real models have


def test_a_short_record_gives_no_worse_policy_than_none(pack: Pack, pieces: I32) -> None:
    """Policies chosen from short records are better than the default, and about as good as the robust one."""
    experts = record_routing(pack, pieces, open_kernels(), silent).experts
    layers = range(experts.shape[1])
    keys = [(layer, expert) for layer in layers for expert in range(16)]
    judged = recording_of_experts(experts[:JUDGED], layers, keys)
    for slots in (len(keys) // 8, len(keys) // 4, len(keys) // 2):

        @cache
        def found(choice: PolicyChoice, slots: int = slots) -> float:
            return replay(judged, choice.open(judged.blocks), slots).hit_rate

        for tokens in (85, 512):
            records = [experts[at:][:tokens] for at in np.linspace(0, len(experts) - tokens, 11).astype(int)]
            chosen = [select(recording_of_experts(record, layers, keys), slots).choice for record in records]
            mean = float(np.mean([found(choice) for choice in chosen]))
            assert mean > found(DEFAULT_POLICY), f"{slots} slots, {tokens} tokens"
            assert mean > found(ROBUST_POLICY) - 0.001, f"{slots} slots, {tokens} tokens"


def test_the_next_router_foretells_what_is_wanted(
    pack: Pack, pieces: I32, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single tokens of held-out text are predicted as often as the stored facts say: three times in four."""
    with closing(in_process_deployment(pack, [1.0], tmp_path)) as deployment:
        memory = deployment.node.budget.used - expert_bytes(deployment.node) // 3 + STAGING
    made = in_process_deployment(
        pack, [1.0], tmp_path, chunk=1, scheduler="window", memory=memory, disk=DirectDisk(threads=1)
    )
    foretold: dict[int, set[int]] = {}
    right: dict[int, list[float]] = {}
    with closing(made) as deployment:
        weights = deployment.node.loop.weights
        expect, hold = weights.expect, weights.hold

        def expecting(block: int, wanted: Sequence[int] | None = None) -> None:
            assert wanted is not None
            foretold[block] = set(wanted)
            expect(block, wanted)

        def holding(block: int, wanted: Sequence[int] | None = None) -> object:
            if block in foretold and wanted is not None:
                right.setdefault(block, []).append(len(foretold.pop(block) & set(wanted)) / len(wanted))
            return hold(block, wanted)

        monkeypatch.setattr(weights, "expect", expecting)
        monkeypatch.setattr(weights, "hold", holding)
        for piece in pieces[:6]:
            Engine(deployment).logits(piece.tolist())
    facts = [layer["foretold"] for layer in trained_facts(MIXTURE)["layers"][1:]]
    shares = [float(np.mean(right[block])) for block in sorted(right)]
    assert shares == pytest.approx(facts, abs=0.1)
    assert np.mean(shares) > 0.7

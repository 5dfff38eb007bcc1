"""Experts that are read from disk on demand: the same tokens, within the memory limit, and the reported figures."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from master.generation.engine import Engine
from master.vocabulary.sampler import Sampler, Sampling
from scheduler.storage.disk import DirectDisk
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.cluster.single import Setting, single_node
from tests.support.generating import generate
from tests.support.models import TOKENS, TinyModel
from tpi.pack.reader import Pack
from worker.node.node import Node

STAGING = 48 << 10  # bytes: what a reader of small slices reads them through, and a page here and there
PROMPT = [5, 6, 7, 8]
Packs = Callable[..., Pack]


def tokens(engine: Engine, count: int = 8) -> list[int]:
    sequence = engine.admit(PROMPT)
    made = [one.token for one in generate(engine, sequence, Sampler(Sampling(temperature=0)), count)]
    engine.release(sequence)
    return made


def expert_bytes(node: Node) -> int:
    kinds = node._residence.kinds
    return sum(size for size, kind in zip(node.budget.placement.sizes, kinds, strict=True) if kind == "ffn")


def reference(model: TinyModel) -> np.ndarray:
    import torch

    with torch.no_grad():
        return np.asarray(model.reference(torch.tensor([TOKENS])).logits[0].numpy())


@pytest.mark.parametrize("dtype", ["f32", "q4"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2moe", "olmoe", "granitemoe", "gptoss"])
def test_experts_that_are_fetched_give_the_same_tokens(
    family: str, dtype: str, tiny_pack: Packs, tmp_path: Path
) -> None:
    pack = tiny_pack(family, dtype)
    with single_node(pack, Setting(), cache=tmp_path) as (engine, node):
        expected, memory = tokens(engine), node.budget.used - expert_bytes(node) // 3 + STAGING
        assert node.fetched is None
        assert node.figures().accelerator == ""
    setting = Setting(memory=memory, verify=True)
    with single_node(pack, setting, disk=DirectDisk(threads=1), cache=tmp_path) as (engine, node):
        assert node.fetched is not None
        assert node.fetched.cache.capacity < len(node.fetched.cache._number)
        assert tokens(engine) == expected
        stats, figures = node.fetched.cache.stats(), node.figures()
        assert stats.misses > 0
        assert figures.streamed_bytes == stats.read_bytes > 0
        assert f"{stats.hit_rate:.0%} of the chosen ones were there (at best" in figures.accelerator
        assert figures.planned_bytes <= memory


@pytest.mark.parametrize("family", ["olmoe", "qwen3moe"])
def test_three_nodes_fetch_a_quarter_of_their_experts(
    family: str, tiny_model: Callable[[str], TinyModel], tiny_pack: Packs, tmp_path: Path
) -> None:
    """The splits are uneven. The master's memory holds about a quarter of its experts, and all resident weights."""
    pack = tiny_pack(family)
    with closing(in_process_deployment(pack, [3, 2, 1], tmp_path)) as deployment:
        node = deployment.node
        expected, memory = tokens(Engine(deployment), 12), node.budget.used - 3 * expert_bytes(node) // 4 + STAGING
    disk = DirectDisk(threads=1)
    made = in_process_deployment(pack, [3, 2, 1], tmp_path, scheduler="window", memory=memory, disk=disk)
    with closing(made) as deployment:
        node = deployment.node
        assert node.fetched is not None
        assert node.budget.used <= memory
        assert node.fetched.cache.capacity <= len(node.fetched.cache._number) // 3
        assert tokens(Engine(deployment), 12) == expected
        np.testing.assert_allclose(Engine(deployment).logits(TOKENS), reference(tiny_model(family)), atol=1e-4)
        assert node.fetched.cache.stats().misses > 0


def test_the_next_router_predicts_once_a_block_has_its_experts(
    tiny_pack: Packs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router of the next block predicts the experts of single tokens more often rightly than by chance (3 of 8)."""
    pack = tiny_pack("qwen3moe")
    with single_node(pack, Setting(), cache=tmp_path) as (engine, node):
        memory = node.budget.used - expert_bytes(node) // 3 + STAGING
    foretold: dict[int, set[int]] = {}
    right: list[float] = []
    with single_node(pack, Setting(memory=memory), disk=DirectDisk(threads=1), cache=tmp_path) as (engine, node):
        weights = node.loop.weights
        expect, hold = weights.expect, weights.hold
        routed = [block.number for block in node.loop.blocks if block.number in weights.now.demanded]

        def expecting(block: int, wanted: Sequence[int] | None = None) -> None:
            assert wanted is not None
            foretold[block] = set(wanted)
            expect(block, wanted)

        def holding(block: int, wanted: Sequence[int] | None = None) -> object:
            if block in foretold and wanted is not None:
                right.append(len(foretold.pop(block) & set(wanted)) / len(wanted))
            return hold(block, wanted)

        monkeypatch.setattr(weights, "expect", expecting)
        monkeypatch.setattr(weights, "hold", holding)
        tokens(engine, 12)
        steps = node.loop.clock.steps
    assert not foretold  # each was for the next hold of its block
    assert len(right) == steps * (len(routed) - 1)
    assert sum(right) / len(right) > 0.5

"""Layers whose heads differ in number and size (Gemma 4), in all modes of a node."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from master.deployment.assignments import assignments
from master.deployment.planner import deal_shards, units_of
from master.deployment.stages import Stage, one_stage
from master.generation.engine import Engine
from master.vocabulary.sampler import Sampler, Sampling
from scheduler.storage.disk import DirectDisk
from tests.support.altered import OPTIONS, PEERS
from tests.support.cluster.inprocess import in_process_deployment, in_process_engine
from tests.support.cluster.single import Setting, single_node
from tests.support.generating import generate
from tests.support.models import VOCAB, TinyModel, reference_logits
from tpi.config import FullHeads
from tpi.errors import PlanError
from tpi.kernels.kv import KvDtype, page_bytes
from tpi.net.fields import GroupBatch
from tpi.net.messages import Assign, Step, StepEntry
from tpi.pack.reader import Pack
from tpi.partition import Range
from worker.node_plan import node_plan
from worker.plan.case import Case
from worker.plan.checks import check_assign, check_step
from worker.plan.choose import allowed_modes
from worker.plan.fit import need

TOKENS = [1, *np.random.default_rng(5).integers(3, VOCAB, 36).tolist()]
LONG = [1, *np.random.default_rng(6).integers(3, VOCAB, 98).tolist()]
GREEDY = Sampler(Sampling(temperature=0))
FAMILIES = ("gemma4", "gemma4moe", "gemma4e")
STAGING = 48 << 10  # bytes: what a reader of small slices reads them through
Packs = Callable[..., Pack]
Models = Callable[[str], TinyModel]


def answer(engine: Engine, tokens: list[int], count: int) -> tuple[list[int], int | None]:
    """Return greedy tokens after a prompt, and the number of the prompt's tokens that were found in the cache."""
    sequence = engine.admit(tokens, reuse=True)
    made = [sampled.token for sampled in generate(engine, sequence, GREEDY, count)]
    engine.release(sequence)
    return made, sequence.cached


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shares", [[1], [2, 1], [1, 0, 3], [1, 3, 2], [1, 4, 1]])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_any_split_and_chunk_equals_transformers(
    family: str, shares: list[float], chunk: int, tiny_model: Models, tiny_pack: Packs, tmp_path: Path
) -> None:
    with in_process_engine(tiny_pack(family), shares, tmp_path, chunk=chunk) as engine:
        logits = engine.logits(TOKENS)
    assert np.abs(logits - reference_logits(tiny_model(family), TOKENS)).max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_three_nodes_that_stream_every_block(family: str, tiny_model: Models, tiny_pack: Packs, tmp_path: Path) -> None:
    made = in_process_deployment(tiny_pack(family), [3, 2, 1], tmp_path, scheduler="window", window=1)
    with closing(made) as deployment:
        logits = Engine(deployment).logits(TOKENS)
        assert deployment.node.streamed.read_bytes > 0
    assert np.abs(logits - reference_logits(tiny_model(family), TOKENS)).max() < 1e-4


@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_experts_that_are_fetched_give_the_same_tokens(dtype: str, tiny_pack: Packs, tmp_path: Path) -> None:
    pack = tiny_pack("gemma4moe", dtype)
    routed = pack.layers[1][2].run("neuron")
    with single_node(pack, Setting(), cache=tmp_path) as (engine, node):
        expected = answer(engine, LONG[:30], 8)[0]
        memory = node.budget.used - 2 * routed.units * routed.unit_bytes // 3 + STAGING
    setting = Setting(memory=memory, verify=True)
    with single_node(pack, setting, disk=DirectDisk(threads=1), cache=tmp_path) as (engine, node):
        assert node.fetched is not None
        assert answer(engine, LONG[:30], 8)[0] == expected
        assert node.fetched.cache.stats().misses > 0


@pytest.mark.parametrize(("kv_dtype", "limit"), [("f16", 5e-3), ("q8", 5e-2), ("q4", 0.6)])
def test_keys_and_values_of_few_bits(
    kv_dtype: KvDtype, limit: float, tiny_model: Models, tiny_pack: Packs, tmp_path: Path
) -> None:
    expected = reference_logits(tiny_model("gemma4"), TOKENS)
    with in_process_engine(tiny_pack("gemma4"), [2, 1], tmp_path, kv=kv_dtype) as engine:
        got = engine.logits(TOKENS)
    assert 0 < np.linalg.norm(got - expected) < limit * np.linalg.norm(expected)


def assigned(pack: Pack, rank: int = 1) -> Assign:
    return assignments(pack, one_stage(pack, [1, 1, 1]), PEERS, OPTIONS, 1, 1)[rank]


def test_nodes_hold_the_kv_heads_of_each_kind_of_layer(tiny_pack: Packs) -> None:
    """Six query heads are on three nodes. Three KV heads divide evenly; of two KV heads, the second node holds both."""
    pack = tiny_pack("gemma4")
    shards = deal_shards(pack.config, units_of(pack), [1, 1, 1])
    assert [shard.kv for shard in shards] == [Range(0, 1), Range(1, 2), Range(2, 3)]
    assert [shard.full_kv for shard in shards] == [Range(0, 1), Range(0, 2), Range(1, 2)]
    plan = node_plan(assigned(pack))
    assert [(each.heads, each.kv_heads, each.head_dim) for each in plan.layer_heads.values()] == [
        (2, 1, 16),
        (2, 2, 32),
    ]
    assert need(plan).page_bytes == page_bytes(1, 1, 16, "f32") + page_bytes(1, 2, 32, "f32")


def test_layers_with_the_keys_of_others_take_no_pages(tiny_pack: Packs) -> None:
    plan = node_plan(assigned(tiny_pack("gemma4e")))
    assert [each.kv_heads for each in plan.layer_heads.values()] == [1, 1, 0, 0, 0]
    assert need(plan).page_bytes == page_bytes(1, 1, 16, "f32") + page_bytes(1, 1, 32, "f32")


def test_steps_without_the_embeddings_of_layers_are_refused(tiny_pack: Packs) -> None:
    entries, values = (StepEntry(1, 0, 2, 0, (0,)),), tiny_pack("gemma4e").config.per_layer_values
    step = Step(1, 1, 1, entries, (), np.zeros((2, 96), np.float32), np.zeros((2, values), np.float32))
    check_step(step, 96, 16, True, values)
    with pytest.raises(PlanError, match="per-layer embeddings"):
        check_step(replace(step, per_layer=step.per_layer[:, 1:]), 96, 16, True, values)


def test_layers_that_share_keys_are_in_one_stage(tiny_pack: Packs) -> None:
    pack = tiny_pack("gemma4e")
    shards = deal_shards(pack.config, units_of(pack), [1])
    stages = [Stage(Range(0, 4), (0,), tuple(shards)), Stage(Range(4, 5), (1,), tuple(shards))]
    with pytest.raises(PlanError, match="layer 4 uses the keys and values of layer 1, which is in another stage"):
        assignments(pack, stages, PEERS[:2], OPTIONS, 1, 1)


def test_plans_whose_heads_do_not_fit_their_layers_are_refused(tiny_pack: Packs) -> None:
    good = assigned(tiny_pack("gemma4"))
    check_assign(good)
    config, full = good.config, good.blocks[2]
    query, kv = full.runs
    size = len(kv.hashes) // (kv.last - kv.first)
    cut = replace(full, runs=(query, replace(kv, last=kv.last - 1, hashes=kv.hashes[size:])))
    for changed, words in (
        (replace(good, blocks=(*good.blocks[:2], cut, good.blocks[3])), "lacks KV heads"),
        (replace(good, config=replace(config, full_heads=None)), "wider than a head"),
        (replace(good, config=replace(config, full_heads=FullHeads(4, 32))), "not a multiple of 4"),
        (replace(good, config=replace(config, full_heads=FullHeads(2, 64))), "units of"),
        (replace(good, config=replace(config, full_heads=FullHeads(0, 32))), "kv_heads of full layers is 0"),
        (replace(good, config=replace(config, windows=(12, 12))), "layers of both kinds"),
        (replace(good, config=replace(config, rope_kinds=(2, 3))), "kinds of rotary embedding"),
    ):
        with pytest.raises(PlanError, match=words):
            check_assign(changed)


def test_plans_without_what_ends_a_layer_with_experts_are_refused(tiny_pack: Packs) -> None:
    good = assigned(tiny_pack("gemma4moe"))
    check_assign(good)
    experts = good.blocks[2]
    assert experts.kind == "experts"
    left = replace(experts, vectors=tuple(one for one in experts.vectors if one.name != "dense_norm"))
    layer = replace(good.layers[0], blocks=good.layers[0].blocks[::2])
    for changed, words in (
        (replace(good, blocks=(*good.blocks[:2], left, *good.blocks[3:])), "the vectors of a block are"),
        (replace(good, layers=(layer, good.layers[1])), "blocks that no layer uses"),
        (replace(good, layers=(replace(layer, blocks=(0, 2, 1)), good.layers[1])), "not attention, ffn and experts"),
    ):
        with pytest.raises(PlanError, match=words):
            check_assign(changed)


def test_micro_batches_are_refused_by_name(tiny_pack: Packs) -> None:
    plan = node_plan(assigned(tiny_pack("gemma4"), 0))
    with pytest.raises(PlanError, match=r"gemma4 models have normed values.*leave --batch out"):
        allowed_modes(Case(replace(plan, options=replace(plan.options, batch=GroupBatch(4, 2, False, 2)))))

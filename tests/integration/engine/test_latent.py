"""Models whose keys and values come from a latent vector, in all modes of a node."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from master.deployment.assignments import assignments
from master.deployment.stages import one_stage
from master.generation.engine import Engine
from master.vocabulary.sampler import Sampler, Sampling
from scheduler.storage.disk import DirectDisk
from tests.support.altered import OPTIONS, PEERS
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.cluster.single import Setting, single_node
from tests.support.devices.offloading import answers, batched, offloaded, prompts, weights_bytes
from tests.support.generating import generate
from tests.support.models import TOKENS, TinyModel
from tests.support.orders import phase_by_phase, use_order
from tpi.devices.choose import open_device
from tpi.devices.options import OffloadOptions
from tpi.errors import PlanError
from tpi.kernels.kv import KvDtype
from tpi.net.messages import Assign
from tpi.pack.reader import Pack
from worker.plan.checks import check_assign

Packs = Callable[..., Pack]
Models = Callable[[str], TinyModel]
FAMILIES = ("deepseek2", "deepseek3", "glm4moelite")
STAGING = 48 << 10  # bytes: what a reader of small slices reads them through


def reference(model: TinyModel) -> np.ndarray:
    import torch

    with torch.no_grad():
        return np.asarray(model.reference(torch.tensor([TOKENS])).logits[0].numpy())


def tokens(engine: Engine) -> list[int]:
    sequence = engine.admit([5, 6, 7, 8])
    made = [one.token for one in generate(engine, sequence, Sampler(Sampling(temperature=0)), 8)]
    engine.release(sequence)
    return made


def test_three_nodes_that_stream_every_block(tiny_model: Models, tiny_pack: Packs, tmp_path: Path) -> None:
    made = in_process_deployment(tiny_pack("deepseek2"), [3, 2, 1], tmp_path, scheduler="window", window=1)
    with closing(made) as deployment:
        np.testing.assert_allclose(Engine(deployment).logits(TOKENS), reference(tiny_model("deepseek2")), atol=1e-4)
        assert deployment.node.streamed.read_bytes > 0


@pytest.mark.parametrize("shares", [[1], [3, 2, 1]])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_in_chunks_equal_transformers(
    family: str, shares: list[int], tiny_model: Models, tiny_pack: Packs, tmp_path: Path
) -> None:
    with closing(in_process_deployment(tiny_pack(family), shares, tmp_path, chunk=7)) as deployment:
        np.testing.assert_allclose(Engine(deployment).logits(TOKENS), reference(tiny_model(family)), atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_phases_may_come_apart(
    family: str, tiny_model: Models, tiny_pack: Packs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_order(monkeypatch, phase_by_phase)
    with closing(in_process_deployment(tiny_pack(family), [2, 1], tmp_path)) as deployment:
        np.testing.assert_allclose(Engine(deployment).logits(TOKENS), reference(tiny_model(family)), atol=1e-4)


@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_experts_that_are_fetched_give_the_same_tokens(dtype: str, tiny_pack: Packs, tmp_path: Path) -> None:
    pack = tiny_pack("deepseek2", dtype)
    mixture = pack.config.mixture
    assert mixture is not None
    routed = pack.layers[1][1].run("neuron")
    with single_node(pack, Setting(), cache=tmp_path) as (engine, node):
        expected, memory = tokens(engine), node.budget.used - routed.units * routed.unit_bytes // 3 + STAGING
    setting = Setting(memory=memory, verify=True)
    with single_node(pack, setting, disk=DirectDisk(threads=1), cache=tmp_path) as (engine, node):
        assert node.fetched is not None
        assert tokens(engine) == expected
        assert node.fetched.cache.stats().misses > 0


@pytest.mark.parametrize(("kv_dtype", "limit"), [("f16", 2e-3), ("q8", 2e-2), ("q4", 0.2)])
def test_keys_and_values_of_few_bits(
    kv_dtype: KvDtype, limit: float, tiny_model: Models, tiny_pack: Packs, tmp_path: Path
) -> None:
    expected = reference(tiny_model("deepseek2"))
    with closing(in_process_deployment(tiny_pack("deepseek2"), [2, 1], tmp_path, kv=kv_dtype)) as deployment:
        got = Engine(deployment).logits(TOKENS)
    assert 0 < np.linalg.norm(got - expected) < limit * np.linalg.norm(expected)


@pytest.mark.parametrize("pipeline", ["auto", "batch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_emulated_accelerator_answers_as_the_host_does(
    family: str, pipeline: str, tiny_pack: Packs, tmp_path: Path
) -> None:
    pack, small = tiny_pack(family), {"context": 64, "pool": 96, "chunk": 32}
    asked = prompts(pack.config.vocab, 7, seed=3)
    with closing(in_process_deployment(pack, [1], tmp_path / "host", **small)) as deployment:  # type: ignore[arg-type]
        expected = answers(deployment, asked)
    options = (
        OffloadOptions("ram", "ram", "batch") if pipeline == "batch" else OffloadOptions("auto", "gpu", crossover=1)
    )
    with (
        closing(open_device("emu:1GiB,stretch=1", weights_bytes(pack) + (12 << 20))) as card,
        offloaded(pack, tmp_path / "card", {0: card}, options, **small) as deployment,  # type: ignore[arg-type]
    ):
        if pipeline == "batch":
            batched(deployment)
        assert answers(deployment, asked) == expected


def worker_plan(pack: Pack) -> Assign:
    return assignments(pack, one_stage(pack, [3, 2, 1]), PEERS, OPTIONS, 1, 1)[1]


def test_a_plan_without_what_its_heads_come_from_is_refused(tiny_pack: Packs) -> None:
    good = worker_plan(tiny_pack("deepseek2"))
    check_assign(good)
    first = good.blocks[0]
    latent, *others = first.runs
    assert (latent.first, latent.last) == (0, good.layouts[latent.layout].units)
    size = len(latent.hashes) // (latent.last - latent.first)
    cut = replace(latent, last=latent.last - 1, hashes=latent.hashes[size:])
    assert good.config.latent is not None
    for changed, words in (
        (with_block(good, replace(first, runs=(cut, *others))), "lacks KV heads"),
        (with_block(good, replace(first, runs=tuple(others))), "has the runs"),
        (with_block(good, replace(first, vectors=first.vectors[:1])), "vectors of a block"),
        (replace(good, config=replace(good.config, latent=None)), "has the runs"),
        (replace(good, config=replace(good.config, latent=replace(good.config.latent, rope=6))), "shared key"),
        (replace(good, config=replace(good.config, latent=replace(good.config.latent, rank=32))), "units of"),
    ):
        with pytest.raises(PlanError, match=words):
            check_assign(changed)


def test_a_plan_without_what_its_queries_come_from_is_refused(tiny_pack: Packs) -> None:
    good = worker_plan(tiny_pack("deepseek3"))
    check_assign(good)
    first = good.blocks[0]
    latent, own, up, *others = first.runs
    assert (own.first, own.last) == (0, good.layouts[own.layout].units)
    cut = [
        replace(one, last=one.last - 1, hashes=one.hashes[: -len(one.hashes) // (one.last - one.first)])
        for one in (own, up)
    ]
    settings = good.config.latent
    assert settings is not None
    without = tuple(vector for vector in first.vectors if vector.name != "q_latent.norm")
    for changed, words in (
        (with_block(good, replace(first, runs=(latent, cut[0], up, *others))), "lacks KV heads"),
        (with_block(good, replace(first, runs=(latent, own, cut[1], *others))), "lacks KV heads"),
        (with_block(good, replace(first, runs=(latent, own, *others))), "has the runs"),
        (with_block(good, replace(first, vectors=without)), "vectors of a block"),
        (replace(good, config=replace(good.config, latent=replace(settings, query_rank=0))), "has the runs"),
        (replace(good, config=replace(good.config, latent=replace(settings, query_rank=64))), "units of"),
        (replace(good, config=replace(good.config, latent=replace(settings, query_rank=-1))), "have -1 values"),
    ):
        with pytest.raises(PlanError, match=words):
            check_assign(changed)


def with_block(assign: Assign, block: object) -> Assign:
    """Return `assign` with another first block."""
    return replace(assign, blocks=(block, *assign.blocks[1:]))  # type: ignore[arg-type]

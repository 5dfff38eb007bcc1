"""Experts in the engine: streamed, whole on one node, on two devices, with rounded sums; and the node that routes."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from master.generation.engine import Engine
from master.vocabulary.sampler import Sampler, Sampling
from scheduler.window.window import MemoryWindow
from tests.support.cluster.inprocess import in_process_deployment, in_process_engine
from tests.support.cluster.single import Setting, single_node
from tests.support.generating import generate
from tests.support.models import MIXTURES, TOKENS, TinyModel
from tests.support.orders import phase_by_phase, use_order
from tpi.kernels.native import NativeKernels
from tpi.kernels.spec import Input, RouterSpec, Routing
from tpi.pack.reader import Pack
from tpi.partition import Range
from worker.node_plan import NodeBlock, RunUnits
from worker.plan import segments
from worker.plan.modes import experts
from worker.plan.segments import NodeSegment

PROMPT = [5, 6, 7, 8]
Packs = Callable[..., Pack]


def tokens(engine: Engine) -> list[int]:
    sequence = engine.admit(PROMPT)
    made = [one.token for one in generate(engine, sequence, Sampler(Sampling(temperature=0)), 8)]
    engine.release(sequence)
    return made


def reference(model: TinyModel) -> np.ndarray:
    import torch

    with torch.no_grad():
        return np.asarray(model.reference(torch.tensor([TOKENS])).logits[0].numpy())


@pytest.mark.parametrize("dtype", ["f32", "q4"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2moe", "olmoe", "gptoss"])
def test_experts_that_stream_give_the_same_tokens(
    family: str, dtype: str, tiny_pack: Packs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "tile_size", lambda smallest: 40_000)
    monkeypatch.setattr(experts, "propose", lambda case: None)
    pack = tiny_pack(family, dtype)
    with single_node(pack, Setting(), cache=tmp_path) as (engine, node):
        expected, everything = tokens(engine), node.budget.used
    layer = sum(node.budget.placement.sizes) // pack.config.layers
    with single_node(pack, Setting(memory=everything - layer), cache=tmp_path) as (engine, node):
        assert isinstance(node.window, MemoryWindow)
        assert max(node.segments) > 1
        assert tokens(engine) == expected
        assert node.streamed.read_bytes > 0


@pytest.mark.parametrize("family", ["qwen3moe", "granitemoe", "gptoss"])
def test_three_nodes_that_stream_equal_transformers(
    family: str, tiny_model: Callable[[str], TinyModel], tiny_pack: Packs, tmp_path: Path
) -> None:
    """With the paper's window, each node reads its slice of every expert again in each step."""
    made = in_process_deployment(tiny_pack(family), [3, 2, 1], tmp_path, scheduler="window", window=1)
    with closing(made) as deployment:
        logits = Engine(deployment).logits(TOKENS)
        assert deployment.node.streamed.read_bytes > 0
    np.testing.assert_allclose(logits, reference(tiny_model(family)), atol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "gptoss"])
def test_phases_may_come_apart(
    family: str,
    tiny_model: Callable[[str], TinyModel],
    tiny_pack: Packs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_order(monkeypatch, phase_by_phase)
    with closing(in_process_deployment(tiny_pack(family), [2, 1], tmp_path)) as deployment:
        logits = Engine(deployment).logits(TOKENS)
    np.testing.assert_allclose(logits, reference(tiny_model(family)), atol=1e-4)


def test_more_nodes_than_slices_hold_whole_experts(
    tiny_model: Callable[[str], TinyModel], tiny_pack: Packs, tmp_path: Path
) -> None:
    with closing(in_process_deployment(tiny_pack("mixtral"), [1] * 5, tmp_path)) as deployment:
        shards = deployment.stages[0].shards
        assert [shard.experts for shard in shards] == [Range(at, at + 1) for at in range(5)]
        assert all(shard.expert == Range(0, 4) for shard in shards)
        np.testing.assert_allclose(Engine(deployment).logits(TOKENS), reference(tiny_model("mixtral")), atol=1e-4)


def test_tokens_choose_once_a_block_however_many_segments_it_has(
    tiny_pack: Packs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = 0
    route = NativeKernels.route

    def counted(kernels: NativeKernels, router: RouterSpec, x: Input) -> Routing:
        nonlocal chosen
        chosen += 1
        return route(kernels, router, x)

    monkeypatch.setattr(NativeKernels, "route", counted)
    monkeypatch.setattr(segments, "tile_size", lambda smallest: 40_000)
    monkeypatch.setattr(experts, "propose", lambda case: None)
    pack = tiny_pack("mixtral")
    with single_node(pack, Setting(), cache=tmp_path) as (_, node):
        memory = node.budget.used - sum(node.budget.placement.sizes) // pack.config.layers
    with single_node(pack, Setting(memory=memory), cache=tmp_path) as (engine, node):
        assert sum(node.segments) > 2 * pack.config.layers
        engine.logits(TOKENS[:8])
        assert chosen == pack.config.layers * node.loop.clock.steps


def test_tiles_of_experts_cover_a_block_and_join_again(tiny_pack: Packs) -> None:
    block = tiny_pack("mixtral").layers[0][1]
    layout = block.run("neuron")
    hashes = block.unit_hashes("neuron").tobytes()
    whole = RunUnits(layout, Range(0, layout.units), hashes)
    for ranges in ([Range(0, 20)], [Range(at * 4 + 1, at * 4 + 3) for at in range(5)]):
        runs = tuple(whole.cut(part) for part in ranges)
        made = NodeBlock(1, 0, "experts", 0, runs)
        for size in (layout.unit_bytes, 3 * layout.unit_bytes, 100 * layout.unit_bytes):
            tiles = [NodeSegment(made, tuple(tile)) for tile in segments._tiled_experts(made, size)]
            assert sum(tile.nbytes for tile in tiles) == made.nbytes
            offsets = [NodeSegment(made, runs).offset_of(tile) for tile in tiles]
            assert offsets == np.cumsum([0, *(tile.nbytes for tile in tiles)])[:-1].tolist()
            joined, numbers = segments.join(tiles, range(len(tiles)))
            assert [one.runs for one in joined] == [runs]
            assert set(numbers) == {0}


@pytest.mark.parametrize("family", MIXTURES)
def test_five_at_once_equal_each_alone(family: str, tiny_pack: Packs, tmp_path: Path) -> None:
    """The tokens of several sequences choose different experts."""
    with in_process_engine(tiny_pack(family), [1], tmp_path / "one") as engine:
        alone = [engine.logits([1, *range(start, start + 9)])[-1] for start in range(3, 43, 8)]
    with in_process_engine(tiny_pack(family), [1, 2], tmp_path / "two") as engine:
        for start, expected in zip(range(3, 43, 8), alone, strict=True):
            np.testing.assert_allclose(engine.logits([1, *range(start, start + 9)])[-1], expected, atol=1e-4)

"""Stages: nodes that hold different layers give the tokens, and the bits, of one node that holds them all."""

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from master.generation.engine import Engine
from master.generation.request import Request, Sampled
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.models import MODELS, VOCAB, TinyModel, make_model, reference_logits
from tests.support.weights.split import F32
from tpi.net.messages import Step, StepEntry
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack

TOKENS = [1, *np.random.default_rng(5).integers(3, VOCAB, 36).tolist()]
TOLERANCE = 1e-4
LENGTH = 20
LAYERS = 6


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pack]:
    """Packs of a model with six layers, by the format of the weights."""
    made: dict[str, Path] = {}
    model = make_model("llama", tmp_path_factory.mktemp("deep"), layers=LAYERS)

    def pack(dtype: str) -> Pack:
        if dtype not in made:
            target = made[dtype] = tmp_path_factory.mktemp("packs") / dtype
            pack_model(open_source(model.directory), dtype, target)
        return Pack.open(made[dtype])

    return pack


def logits(pack: Pack, shares: list[float], cache: Path, stages: str, chunk: int) -> F32:
    with closing(in_process_deployment(pack, shares, cache, chunk, stages=stages)) as deployment:
        return Engine(deployment).logits(TOKENS)


class Answers:
    """Requests of mixed lengths at once, some with a common prefix, and the tokens that were drawn for them."""

    def __init__(self, engine: Engine) -> None:
        rng = np.random.default_rng(3)
        prompts = [TOKENS, [*TOKENS[:34], 9], *(rng.integers(3, VOCAB, size).tolist() for size in (1, 5, 70))]
        self.said: list[list[int]] = [[] for _ in prompts]
        self.engine = engine
        self.left = {number: self._request(number, prompt) for number, prompt in enumerate(prompts)}
        for request in self.left.values():
            engine.submit(request)

    def _request(self, number: int, prompt: list[int]) -> Request:
        def sink(sampled: Sampled) -> bool:
            self.said[number].append(sampled.token)
            return True

        sampler = Sampler(Sampling(temperature=0.8, seed=number))
        return Request(self.engine.admit(prompt, reuse=True), sampler, LENGTH, sink)

    def step(self) -> None:
        """Run a step, and release the requests that it finished."""
        self.engine.step()
        for number, request in list(self.left.items()):
            if request.finished:
                self.engine.release(self.left.pop(number).sequence)

    def cancel(self, number: int) -> None:
        """Cancel a request, as when its client leaves."""
        request = self.left.pop(number)
        self.engine.withdraw(request)
        self.engine.release(request.sequence)


def answers(pack: Pack, shares: list[float], cache: Path, stages: str, pool: int, window: int = 0) -> list[list[int]]:
    """Return what `Answers` draws. With a `window`, every node streams all blocks but a number of resident ones."""
    scheduler = "window" if window else "resident"
    made = in_process_deployment(pack, shares, cache, 16, stages=stages, pool=pool, window=window, scheduler=scheduler)
    with closing(made) as deployment:
        nodes = [deployment.node, *(deployment._workers.nodes if len(shares) > 1 else ())]  # type: ignore[attr-defined]
        assert all(bool(node.window.placement.streamed_bytes) == bool(window and node.loop.blocks) for node in nodes)
        asked = Answers(Engine(deployment))
        while asked.left:
            asked.step()
        assert deployment.pages.free == pool
    return asked.said


@pytest.mark.parametrize("family", MODELS)
def test_every_family_in_two_stages_has_the_bits_of_one_node(
    family: str, tiny_model: Callable[[str], TinyModel], tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    pack = tiny_pack(family)
    alone, staged = (
        logits(pack, shares, tmp_path / stages, stages, 7) for shares, stages in (([1.0], "1"), ([1.0, 1.0], "2"))
    )
    assert np.abs(staged - reference_logits(tiny_model(family), TOKENS)).max() < TOLERANCE
    assert np.array_equal(alone, staged)


def test_embeddings_of_layers_reach_every_stage(
    tiny_model: Callable[[str], TinyModel], tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    pack, model = tiny_pack("gemma4staged"), tiny_model("gemma4staged")
    layout = "0:n1,1-5:n0"  # layers 3 to 5 use the keys and values of 1 and 2
    alone, staged = logits(pack, [1], tmp_path / "one", "1", 7), logits(pack, [1, 1], tmp_path, layout, 7)
    assert np.abs(staged - reference_logits(model, TOKENS)).max() < TOLERANCE
    assert np.array_equal(alone, staged)
    expected = answers(pack, [1], tmp_path / "one", "1", 40)
    assert answers(pack, [1], tmp_path / "one", "1", 6) == expected  # six pages: sequences are preempted
    assert answers(pack, [1, 1], tmp_path, layout, 6) == expected


@pytest.mark.parametrize("dtype", ["f32", "q8", "q4"])
def test_stages_of_one_node_each_have_the_bits_of_one_node(
    dtype: str, deep: Callable[[str], Pack], tmp_path: Path
) -> None:
    pack = deep(dtype)
    alone = logits(pack, [1], tmp_path / "one", "1", 16)
    assert np.array_equal(logits(pack, [1, 1, 2, 1], tmp_path, "4", 16), alone)
    assert np.array_equal(logits(pack, [0, 1, 1], tmp_path / "idle", "2", 16), alone)
    assert np.array_equal(logits(pack, [1, 1, 1], tmp_path / "mixed", "0-1:n2,2:n0,3-5:n1", 16), alone)


def drawn_layout(rng: random.Random) -> tuple[list[float], str]:
    """Return one to six nodes with shares, and their layout in one to four stages or in a ring."""
    if rng.random() < 0.25:
        nodes = rng.randint(2, 3)
        turns = [rank for _ in range(rng.randint(2, LAYERS // nodes)) for rank in range(nodes)]
        ends = [*sorted(rng.sample(range(1, LAYERS), len(turns) - 1)), LAYERS]
        return [1.0] * nodes, ",".join(
            f"{a}-{b - 1}:n{rank}" for a, b, rank in zip([0, *ends[:-1]], ends, turns, strict=True)
        )
    shares = [rng.choice([0.0, 1.0, 1.0, 2.0]) for _ in range(rng.randint(1, 6))]
    if not any(shares):
        shares[0] = 1.0
    holders = [rank for rank, share in enumerate(shares) if share]
    rng.shuffle(holders)
    count = min(len(holders), rng.randint(1, 4))
    cuts = sorted(rng.sample(range(1, LAYERS), count - 1))
    groups: list[list[int]] = [[rank] for rank in holders[:count]]
    for rank in holders[count:]:
        if rng.random() < 0.8:  # the others hold no layers
            rng.choice(groups).append(rank)
    parts = zip([0, *cuts], [*cuts, LAYERS], groups, strict=True)
    return shares, ",".join(f"{a}-{b - 1}:{'+'.join(f'n{rank}' for rank in group)}" for a, b, group in parts)


@pytest.mark.parametrize("seed", range(12))
def test_random_layouts_give_the_tokens_of_one_node(seed: int, deep: Callable[[str], Pack], tmp_path: Path) -> None:
    rng = random.Random(seed)
    shares, layout = drawn_layout(rng)
    pool, pack = rng.choice([6, 40]), deep("f32")  # six pages: sequences are preempted
    assert answers(pack, shares, tmp_path, layout, pool) == answers(pack, [1], tmp_path / "one", "1", 40), layout


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_leave_while_their_steps_are_in_flight_change_no_other(
    seed: int, deep: Callable[[str], Pack], tmp_path: Path
) -> None:
    rng, pack = random.Random(seed), deep("f32")
    expected = answers(pack, [1], tmp_path / "one", "1", 40)
    with closing(in_process_deployment(pack, [1, 1, 1], tmp_path, 16, stages="3", pool=9)) as deployment:
        asked = Answers(Engine(deployment))
        while asked.left:
            asked.step()
            if len(asked.left) > 2 and rng.random() < 0.1:
                asked.cancel(rng.choice(list(asked.left)))
        assert deployment.pages.free == 9
    for said, whole in zip(asked.said, expected, strict=True):
        assert said == whole[: len(said)]
    assert sum(len(said) == LENGTH for said in asked.said) >= 2


def test_a_deployment_is_replaced_while_steps_are_in_flight(deep: Callable[[str], Pack], tmp_path: Path) -> None:
    pack = deep("f32")
    expected = answers(pack, [1], tmp_path / "one", "1", 40)
    with closing(in_process_deployment(pack, [1, 1, 1], tmp_path, 16, stages="3", pool=40)) as first:
        asked = Answers(Engine(first))
        for _ in range(11):
            asked.step()
        assert asked.engine._in_flight
    with closing(in_process_deployment(pack, [1, 1], tmp_path / "two", 16, stages="2", epoch=2)) as second:
        asked.engine.replace(second)
        while asked.left:
            asked.step()
    assert asked.said == expected


@pytest.mark.parametrize("layout", ["3", "0-1:n1,2-3:n0,4-5:n2"])
def test_streams_and_the_chunks_of_a_prompt_fill_the_stages(
    layout: str, deep: Callable[[str], Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(in_process_deployment(deep("f32"), [1, 1, 1], tmp_path, 16, stages=layout)) as deployment:
        engine, started = Engine(deployment), list[tuple[int, list[int]]]()
        start = deployment.start

        def noted(entries: tuple[StepEntry, ...], released: tuple[int, ...], x: F32, per_layer: F32 | None) -> None:
            started.append((len(engine._in_flight), [entry.count for entry in entries]))
            start(entries, released, x, per_layer)

        monkeypatch.setattr(deployment, "start", noted)
        sequence = engine.admit([5] * 40)
        engine.submit(Request(sequence, Sampler(Sampling(temperature=0)), 1, lambda _: True))
        engine.step()
        assert started == [(0, [16]), (1, [16]), (2, [8])]
        while engine.requests:
            engine.step()
        engine.release(sequence)
        asked = Answers(engine)
        while not all(said for number, said in enumerate(asked.said) if number in asked.left):
            asked.step()
        started.clear()
        for _ in range(9):
            asked.step()
        assert {out for out, _ in started} == {2}  # each new step goes out while two others are in flight
        assert {len(counts) for _, counts in started} <= {1, 2}  # five requests over three stages
        while asked.left:
            asked.step()


def test_a_node_of_several_stages_has_one_step_in_flight_and_the_bits_of_one_node(
    deep: Callable[[str], Pack], tmp_path: Path
) -> None:
    pack, ring = deep("q4"), "0:n0,1:n1,2-3:n0,4:n2,5:n1"
    assert np.array_equal(logits(pack, [1] * 3, tmp_path, ring, 16), logits(pack, [1], tmp_path / "one", "1", 16))
    with closing(in_process_deployment(pack, [1] * 3, tmp_path, 16, stages=ring)) as deployment:
        assert deployment.most_in_flight == 1
        held = [node.loop.blocks for node in (deployment.node, *deployment._workers.nodes)]  # type: ignore[attr-defined]
        assert [[block.name for block in blocks[::2]] for blocks in held] == [
            [f"attention {layer}" for layer in layers] for layers in ((0, 2, 3), (1, 5), (4,))
        ]


@pytest.mark.parametrize("layout", ["0:n0,1:n1,2:n0,3:n1,4:n0,5:n1", "0-1:n1,2-3:n0,4-5:n1"])
def test_a_ring_of_nodes_streams_its_layers(layout: str, deep: Callable[[str], Pack], tmp_path: Path) -> None:
    pack = deep("f32")
    expected = answers(pack, [1], tmp_path / "one", "1", 40)
    assert answers(pack, [1, 1], tmp_path, layout, 40, window=2) == expected


def test_stages_stream_their_own_layers(deep: Callable[[str], Pack], tmp_path: Path) -> None:
    pack = deep("f32")
    expected = answers(pack, [1], tmp_path / "one", "1", 40)
    assert answers(pack, [1, 1, 1], tmp_path, "0-2:n0+n1,3-5:n2", 40, window=2) == expected


def test_only_the_first_stage_gets_hidden_states(
    deep: Callable[[str], Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(in_process_deployment(deep("f32"), [1, 1, 1], tmp_path, stages="0-1:n0+n1,2-5:n2")) as deployment:
        seen: list[tuple[int, Step]] = []
        for rank, node in enumerate(deployment._workers.nodes, 1):  # type: ignore[attr-defined]
            run = node.run

            def noted(step: Step, rank: int = rank, run: Callable[[Step], F32 | None] = run) -> F32 | None:
                seen.append((rank, step))
                return run(step)

            monkeypatch.setattr(node, "run", noted)
        Engine(deployment).logits(TOKENS)
    assert {len(step.x) == step.tokens for rank, step in seen if rank == 1} == {True}
    assert {len(step.x) for rank, step in seen if rank == 2} == {0}

"""Experts through a table of chunks: some are resident, the others are streamed in chunks, and one call computes all.

Tokens are those of each request alone, in drawn timings; copies end in any order, half by half.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.cluster.inprocess import ThreadedWorkers, in_process_deployment
from tests.support.devices.chunked import Counted, in_chunks
from tests.support.devices.offloading import answers, batched, offloaded, prompts, weights_bytes
from tests.support.devices.opencl_device import opencl_device
from tests.support.devices.schedules import SCHEDULES, WHOLE, use_schedule
from tests.support.devices.shuffled import Shuffled
from tests.support.kernels.kernel_cases import native
from tests.support.models import make_model
from tpi.config import Format
from tpi.devices.base import Device
from tpi.devices.choose import open_device
from tpi.devices.options import OffloadOptions, Weights
from tpi.devices.pages import Bytes
from tpi.kernels.spec import SHARED
from tpi.net.fields import GroupBatch
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from worker.accelerator.rings import Rings
from worker.node.node import Node
from worker.pipelines.accelerated import BatchAccelerated
from worker.pipelines.chunktable import TableExperts

FAMILIES = ("mixtral", "qwen2moe", "gptoss")  # plain, with a shared expert, with biases of down; five experts each
FEW, MANY = 3, 13  # chunks of a layer: fewer than experts, and more
MUCH, LITTLE = 0.58, 0.28  # of the weights stay: with room for the shared expert, and without; both cut an expert
SEEDS = 12
KEPT, CHUNKS = [MUCH, LITTLE, 0.0], [1, FEW, MANY]
PAIRWISE = [(family, KEPT[b], CHUNKS[(a + b) % 3]) for a, family in enumerate(FAMILIES) for b in range(3)]
OPTIONS = OffloadOptions("auto", "ram", "batch")
SMALL: dict[str, Any] = {"context": 64, "pool": 24, "chunk": 32}  # tokens, pages


@pytest.fixture(scope="module")
def pack_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pack]:
    """Return a function that makes packs of three layers.

    With two, each layer would have a place of its own, and stale data would be right.
    """
    made: dict[str, Path] = {}

    def get(family: str) -> Pack:
        if family not in made:
            source, made[family] = tmp_path_factory.mktemp(family), tmp_path_factory.mktemp("packs") / family
            make_model(family, source, layers=3)
            pack_model(open_source(source), "f32", made[family])
        return Pack.open(made[family])

    return get


def tables(node: Node) -> list[TableExperts]:
    """Return the segments of a node whose experts come through a table."""
    return [each for block in node.loop.weights.now.blocks for each in block if isinstance(each, TableExperts)]


def alone(pack: Pack, cache: Path, asked: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    with closing(in_process_deployment(pack, [1], cache, **SMALL)) as deployment:
        return [answers(deployment, [prompt], length)[0] for prompt in asked]


@pytest.mark.parametrize(("family", "kept", "chunks"), PAIRWISE)
def test_tokens_do_not_depend_on_timing(
    family: str, kept: float, chunks: int, pack_of: Callable[[str], Pack], tmp_path: Path
) -> None:
    """Prompts and then answers, under every schedule, within the planned memory."""
    pack, kernels = pack_of(family), Counted(native)
    asked = [prompts(pack.config.vocab, 5, seed, longest=36) for seed in range(SEEDS)]
    expected = [alone(pack, tmp_path / f"host {seed}", each, 2) for seed, each in enumerate(asked)]
    with (
        closing(Shuffled(kernels, 0)) as device,
        offloaded(pack, tmp_path / "batch", {0: device}, OPTIONS, decide={0: in_chunks(kept, chunks)}, **SMALL) as made,
    ):
        link = batched(made)
        _check_cut(made.node, kept, chunks)
        planned, capacity = link.pipeline.schedule, link.offload.memory_bytes
        for seed in range(SEEDS):
            random = device._random = Random(seed)
            schedule = replace(planned, micro_batch=random.randint(1, 5))
            if random.random() < 0.3:
                name = random.choice(list(SCHEDULES))
                schedule = SCHEDULES[name](link.pipeline.attends, schedule.micro_batch)
            link.lanes.adds_there = random.random() < 0.5
            use_schedule(link, schedule, 4096 * random.randint(1, 32) if random.random() < 0.5 else WHOLE)
            assert answers(made, asked[seed], 2) == expected[seed], seed
            assert device.memory.used <= capacity
        assert link.figures.weight_bytes > 0
        assert ("experts" in kernels.calls) == (not tables(made.node))


def _check_cut(node: Node, kept: float, chunks: int) -> None:
    """Check that experts are cut in the middle, by the resident part or by chunks, which is what the test needs."""
    link = node.link
    assert isinstance(link, BatchAccelerated)
    found, used = tables(node), link.offload.pieces
    if not kept and chunks == 1 and not any(run.name == "shared" for piece in used for run in piece.runs):
        assert not found  # one piece in one place
        return
    assert found
    for segment in found:
        numbers = [piece.expert for piece in segment.spec.pieces]
        assert len(numbers) >= len(set(numbers)) == 5
        assert len(numbers) > 5 or (not kept and chunks == 1)
        assert (segment.spec.shared is not None) == any(entry.piece == SHARED for entry in segment.table._table)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_computes_what_stays_and_what_passes_through(
    family: str, pack_of: Callable[[str], Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for each micro-batch and block of experts, of prompts and of answers."""
    pack, kernels, parts = pack_of(family), Counted(native), list[int]()
    with (
        closing(Shuffled(kernels, 0)) as device,
        offloaded(pack, tmp_path, {0: device}, OPTIONS, decide={0: in_chunks(MUCH, FEW)}, **SMALL) as made,
    ):
        link = batched(made, 2)
        divide = link.pipeline.divide

        def counting(x: Any, batch: Any) -> Any:
            divided = divide(x, batch)
            parts.append(len(divided[0]))
            return divided

        monkeypatch.setattr(link.pipeline, "divide", counting)
        answers(made, prompts(pack.config.vocab, 7, seed=1), 4)
        blocks = [block for block in made.node.loop.weights.now.blocks if isinstance(block[0], TableExperts)]
        assert blocks
        assert all(len(block) == 1 for block in blocks)
        assert sum(parts) > len(parts) > 4
        assert kernels.calls["expert_pieces"] == sum(parts) * len(blocks)
        assert "experts" not in kernels.calls


@pytest.mark.parametrize("weights", ["auto", "disk"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_group_of_two_nodes(family: str, weights: Weights, pack_of: Callable[[str], Pack], tmp_path: Path) -> None:
    """Each node has a slice of every expert in its own chunks, from RAM or from a disk."""
    pack = pack_of(family)
    asked = prompts(pack.config.vocab, 5, seed=1, longest=20)
    expected = alone(pack, tmp_path / "host", asked, 3)
    with ExitStack() as stack:
        cards = {rank: stack.enter_context(closing(Shuffled(native, rank))) for rank in (0, 1)}
        more: dict[str, Any] = SMALL | {"batch": GroupBatch(5, 3, True, 16)}
        options, decide = replace(OPTIONS, weights=weights), in_chunks(MUCH if weights == "auto" else 0.0, MANY)
        made = stack.enter_context(
            offloaded(pack, tmp_path / "two", cards, options, (2, 3), {0: decide, 1: decide}, **more)
        )
        workers = made._workers
        assert isinstance(workers, ThreadedWorkers)
        nodes = [made.node, *workers.nodes]
        assert all(map(tables, nodes))
        for seed in range(SEEDS):
            for rank, node in enumerate(nodes):
                random = cards[rank]._random = Random(2 * seed + rank)
                assert isinstance(node.link, BatchAccelerated)
                node.link.lanes.adds_there = random.random() < 0.5
            assert answers(made, asked, 3) == expected, seed
        for rank, node in enumerate(nodes):
            assert isinstance(node.link, BatchAccelerated)
            assert cards[rank].memory.used <= node.link.offload.memory_bytes


@pytest.mark.parametrize(("family", "kept"), [("mixtral", MUCH), ("qwen2moe", LITTLE), ("gptoss", 0.0)])
def test_chunks_come_from_a_disk_where_ram_does_not_hold_all(
    family: str, kept: float, pack_of: Callable[[str], Pack], tmp_path: Path
) -> None:
    """Chunks are read in the order of use, and compared with their hashes, as are resident weights."""
    pack = pack_of(family)
    asked = prompts(pack.config.vocab, 7, seed=3)
    expected = alone(pack, tmp_path / "host", asked, 4)
    with (
        closing(open_device("emu:1GiB,stretch=1", weights_bytes(pack) + (8 << 20))) as card,
        offloaded(
            pack, tmp_path / "batch", {0: card}, replace(OPTIONS, weights="disk"), decide={0: in_chunks(kept, MANY)},
            verify_weights=True, **SMALL,
        ) as made,
    ):  # fmt: skip
        link = batched(made)
        assert answers(made, asked, 4) == expected
        assert made.node.window.placement.streamed_bytes > 0
        assert made.node.window.progress >= link.figures.weight_bytes > 0


@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_a_step_whose_chunk_failed_can_be_done_again(
    dtype: Format, tiny_pack: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any chunk may fail. Chunks that were held with it are released, and its place fails until it is repaired."""
    pack, left, broken = tiny_pack("mixtral", dtype), [-1], set[int]()
    copy = Rings._copy

    def failing(self: Rings, device: Device, source: Bytes, target: Bytes) -> None:
        left[0] -= 1
        if not left[0]:
            broken.add(target.ctypes.data)
        if target.ctypes.data in broken:  # a load ahead that failed is made once more
            raise OSError("a chunk failed")
        copy(self, device, source, target)

    monkeypatch.setattr(Rings, "_copy", failing)
    asked = prompts(pack.config.vocab, 4, seed=2)
    with closing(in_process_deployment(pack, [1], tmp_path / "host", **SMALL)) as deployment:
        expected = answers(deployment, asked, 3)
    with (
        closing(Shuffled(native, 0)) as device,
        offloaded(pack, tmp_path / "batch", {0: device}, OPTIONS, decide={0: in_chunks(MUCH, MANY)}, **SMALL) as made,
    ):
        batched(made)
        for ahead in range(1, 60, 4):
            left[0] = ahead
            with pytest.raises(OSError, match="a chunk failed"):
                answers(made, asked, 3)
            broken.clear()
            assert answers(made, asked, 3) == expected, ahead


def test_an_opencl_device(pack_of: Callable[[str], Pack], tmp_path: Path) -> None:
    """Real queues and events, and memory that is not the host's."""
    pack = pack_of("qwen2moe")
    asked = prompts(pack.config.vocab, 5, seed=3)
    expected = alone(pack, tmp_path / "host", asked, 3)
    decide = in_chunks(MUCH, FEW)
    with (
        opencl_device(weights_bytes(pack) + (8 << 20)) as device,
        offloaded(pack, tmp_path / "card", {0: device}, OPTIONS, decide={0: decide}, **SMALL) as made,
    ):
        assert tables(made.node)
        assert answers(made, asked, 3) == expected
        assert batched(made).figures.weight_bytes > 0


def test_chunks_have_names_of_their_own_in_a_trace(pack_of: Callable[[str], Pack], tmp_path: Path) -> None:
    pack = pack_of("mixtral")
    with (
        closing(Shuffled(native, 0)) as device,
        offloaded(pack, tmp_path, {0: device}, OPTIONS, decide={0: in_chunks(MUCH, FEW)}, trace=True, **SMALL) as made,
    ):
        batched(made)
        answers(made, prompts(pack.config.vocab, 5, seed=3), 2)
        names = {row[1] for row in made.node.trace.rows if row[0] == "weight load"}
        calls = {row[1] for row in made.node.trace.rows if row[0] == "accelerator"}
    assert {f"experts 1, chunk {number}" for number in range(1, FEW + 1)} < names
    assert "experts 1" in calls

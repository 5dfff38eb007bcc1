"""SwiGLU models gate first: the tokens of the ordinary pack where nothing is left out, alone, in a group, from disk."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from master.deployment.assignments import assignments
from master.deployment.planner import deal_shards, units_of
from master.deployment.sentgates import SentGates
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.offloading import answers, prompts
from tests.support.models import TinyModel
from tpi.errors import PlanError
from tpi.kernels import open_kernels
from tpi.net.messages import Assign, GatePlan, NodeOptions, PeerAddress, VectorPlan
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.sparsity.gates import GateCurves, measure_curves
from worker.neurons.gates.segment import GatedNode
from worker.plan.checks import check_assign
from worker.plan.gates import refuse_gates
from worker.plan.node_plan import node_plan

TEXT = np.random.default_rng(3).integers(3, 320, (3, 24)).astype(np.int32)
SMALL: dict[str, Any] = {"context": 64, "pool": 96}
THREE = [3.0, 2.0, 1.0]
PEERS = [PeerAddress(rank, f"node {rank}", "tcp://127.0.0.1:1" if rank else "") for rank in range(2)]


@dataclass(frozen=True)
class Packs:
    """A model in both layouts, and what of it may be left out."""

    plain: Pack
    first: Pack
    curves: GateCurves


@pytest.fixture(scope="module")
def packs(tiny_model: Callable[[str], TinyModel], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Packs]:
    """150 neurons: the last unit is filled up."""
    directory, made = tmp_path_factory.mktemp("gates"), dict[str, Packs]()

    def packed(dtype: str) -> Packs:
        if dtype not in made:
            for name in ("plain", "first"):
                source = open_source(tiny_model("llama3").directory)
                pack_model(source, dtype, directory / dtype / name, gate_first=name == "first")
            plain, first = (Pack.open(directory / dtype / name) for name in ("plain", "first"))
            made[dtype] = Packs(plain, first, measure_curves(plain, TEXT, open_kernels()))
        return made[dtype]

    return packed


def answered(
    pack: Pack, cache: Path, gates: SentGates | None, shares: list[float], **more: Any
) -> tuple[list[list[int]], GatedNode | None]:
    """Greedy answers to one sequence and to four at once, and what rank 0 left out."""
    asked = [prompts(pack.config.vocab, count, seed=count, longest=20) for count in (1, 4)]
    made = in_process_deployment(pack, shares, cache, gates=gates, **SMALL | more)
    with closing(made) as deployment:
        found = [answer for some in asked for answer in answers(deployment, some, 12)]
        return found, deployment.node.gated


@pytest.mark.parametrize("shares", [[1.0], THREE], ids=["one", "three"])
def test_without_an_error_tokens_are_those_of_the_ordinary_pack(
    shares: list[float], packs: Callable[[str], Packs], tmp_path: Path
) -> None:
    both = packs("f32")
    expected, nobody = answered(both.plain, tmp_path / "plain", None, [1.0])
    found, gated = answered(both.first, tmp_path / "first", SentGates(both.curves, 0.0), shares)
    assert nobody is None
    assert found == expected
    assert gated is not None
    assert gated.of
    assert gated.skipped == 0


@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_a_group_and_a_stream_leave_out_what_one_node_does(
    dtype: str, packs: Callable[[str], Packs], tmp_path: Path
) -> None:
    both = packs(dtype)
    gates = SentGates(both.curves, 0.5)
    alone, gated = answered(both.first, tmp_path / "alone", gates, [1.0])
    assert gated is not None
    assert 0.05 < gated.skipped < 0.95
    assert gated.of % 150 == 0
    assert "of the neurons were skipped after their gate" in gated.describe()
    streamed, again = answered(both.first, tmp_path / "disk", gates, [1.0], scheduler="window", window=2)
    assert streamed == alone
    assert again is not None
    assert (again.computed, again.of) == (gated.computed, gated.of)
    group, mine = answered(both.first, tmp_path / "group", gates, THREE)
    assert mine is not None
    assert 0 < mine.of < gated.of
    if dtype == "f32":
        assert group == alone


def test_a_pack_made_for_it_is_whole_without(packs: Callable[[str], Packs], tmp_path: Path) -> None:
    both = packs("f32")
    expected, _ = answered(both.plain, tmp_path / "plain", None, [1.0])
    found, gated = answered(both.first, tmp_path / "first", None, [1.0])
    assert found == expected
    assert gated is None


@pytest.fixture
def plan(packs: Callable[[str], Packs]) -> Assign:
    both = packs("f32")
    options = NodeOptions(64, 4, "f32", 16, sparsity="static")
    shards = deal_shards(both.first.config, units_of(both.first), [2.0, 3.0])
    return assignments(both.first, shards, PEERS, options, 1, 1, gates=SentGates(both.curves, 0.1))[1]


def test_a_right_plan_is_taken_and_counts_what_is_sent(plan: Assign) -> None:
    check_assign(plan)
    assert [one.layer for one in plan.gates] == [0, 1]
    node = node_plan(plan)
    assert node.neurons == 96  # of three units, and not of the gates' three beside them
    assert node.predictor_bytes == 2 * 4 * (150 - 64) * len(plan.gates)


def test_what_does_not_fit_is_refused(plan: Assign) -> None:
    first, second = plan.gates
    at = first.block
    cut = replace(plan.blocks[at], vectors=(VectorPlan("least", 5),))
    changes: list[dict[str, Any]] = [
        {"gates": (first, replace(second, layer=0))},
        {"gates": (first, replace(second, layer=9))},
        {"gates": (GatePlan(0, 0), second)},
        {"blocks": tuple(cut if number == at else block for number, block in enumerate(plan.blocks))},
        {"config": replace(plan.config, activation="drelu")},
        {"config": replace(plan.config, gated=False)},
    ]
    for wrong in changes:
        with pytest.raises(PlanError, match=r"gate|layer|neurons|no layer uses"):
            check_assign(replace(plan, **wrong))


def test_gates_of_other_neurons_are_refused(plan: Assign) -> None:
    at = next(number for number, block in enumerate(plan.blocks) if block.kind == "ffn" and block.runs)
    gate, neuron = plan.blocks[at].runs
    fewer = replace(gate, last=gate.last - 1, hashes=gate.hashes[:-32])
    block = replace(plan.blocks[at], runs=(fewer, neuron))
    with pytest.raises(PlanError, match="gates of other neurons"):
        check_assign(replace(plan, blocks=(*plan.blocks[:at], block, *plan.blocks[at + 1 :])))


def test_an_accelerator_refuses_it_by_name(plan: Assign) -> None:
    with pytest.raises(PlanError, match="this node also uses a card; use --device cpu"):
        refuse_gates(node_plan(plan), "a card")

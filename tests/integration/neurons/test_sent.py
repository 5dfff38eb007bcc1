"""A worker accepts only predictors of its own neurons, of the sizes in the plan."""

from dataclasses import replace
from typing import Any

import pytest

from master.deployment.assignments import assignments
from master.deployment.stages import one_stage
from master.workers.predictors import PredictorSource
from tests.support.devices.predicted import exact_predictors
from tests.support.weights.regular import NeuronUse, write_regular
from tests.support.weights.shapes import LLAMA_1B
from tpi.errors import PlanError
from tpi.net.messages import Assign, NodeOptions, PeerAddress, VectorPlan
from tpi.pack.reader import Pack
from worker.plan.checks import check_assign

SHAPE: dict[str, Any] = LLAMA_1B | {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip
PEERS = [PeerAddress(rank, f"node {rank}", "tcp://127.0.0.1:1" if rank else "") for rank in range(2)]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return write_regular(tmp_path_factory.mktemp("relu") / "pack", SHAPE, NeuronUse(rank=32), "f32")


@pytest.fixture(scope="module")
def plan(pack: Pack) -> Assign:
    options = NodeOptions(64, 4, "f32", 16, sparsity="static")
    stages = one_stage(pack, [2.0, 1.0])
    sent = PredictorSource(exact_predictors(pack))
    return assignments(pack, stages, PEERS, options, 1, 1, predictors=sent)[1]


def test_a_right_plan_is_taken(plan: Assign) -> None:
    check_assign(plan)
    assert [one.layer for one in plan.predictors] == [0, 1]
    assert len(plan.blocks) == len({index for layer in plan.layers for index in layer.blocks}) + 2


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 64}, {"neurons": 32}, {"layer": 7}, {"ahead": 1}, {"threshold": float("nan")}, {"weights": "q8"},
        {"weights": "q4s"}, {"block": 0},
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_is_refused(change: dict[str, Any], plan: Assign) -> None:
    first, *others = plan.predictors
    with pytest.raises(PlanError, match=r"predictor|no layer uses"):
        check_assign(replace(plan, predictors=(replace(first, **change), *others)))


def test_two_predictors_of_a_layer_are_refused(plan: Assign) -> None:
    first, second = plan.predictors
    with pytest.raises(PlanError, match="two predictors"):
        check_assign(replace(plan, predictors=(first, replace(second, layer=0))))


def test_matrices_of_other_sizes_are_refused(plan: Assign) -> None:
    at = plan.predictors[0].block
    cut = replace(plan.blocks[at], vectors=(VectorPlan("first", 5), *plan.blocks[at].vectors[1:]))
    blocks = tuple(cut if number == at else block for number, block in enumerate(plan.blocks))
    with pytest.raises(PlanError, match="sizes do not match"):
        check_assign(replace(plan, blocks=blocks))


def test_of_every_plan_only_the_last_ones_vectors_are_kept(pack: Pack) -> None:
    """Otherwise the master would store all predictors again with each worker that is lost or joins."""
    sent, options = PredictorSource(exact_predictors(pack)), NodeOptions(64, 4, "f32", 16, sparsity="static")
    for epoch, shares in enumerate([[2.0, 1.0], [1.0, 1.0], [1.0, 2.0]], 1):
        stages = one_stage(pack, shares)
        plans = assignments(pack, stages, PEERS, options, 1, epoch, predictors=sent)
        named = {plan.blocks[one.block].id for plan in plans for one in plan.predictors}
        assert set(sent.vectors) == named

"""The planner counts only the experts that a token chooses, with Mixtral's shape."""

from dataclasses import replace
from pathlib import Path

import pytest

from master.planning.problem import planning_problem, request_of
from master.planning.shapes import model_shape
from scheduler.model.machine import LAPTOP
from scheduler.model.offload.choice import choose
from scheduler.model.offload.memory import Needs
from scheduler.model.offload.problem import Limits, Problem
from scheduler.model.offload.tasks import Tasks
from scheduler.model.offload.work import NodeWork, StepSize, Workload
from tests.support.paths import ROOT

MIXTRAL = ROOT / "tests/support/data/mixtral-8x7b"


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> NodeWork:
    cache: Path = tmp_path_factory.mktemp("cache")
    shape = model_shape(str(MIXTRAL), "q4", cache, 1 << 40)
    return planning_problem(shape, LAPTOP, request_of(shape.config, None, None, 1, None), None, "f16").work


def test_a_token_of_mixtral_reads_two_of_eight_experts(mixtral: NodeWork) -> None:
    experts = sum(segment.nbytes for segment in mixtral.segments if segment.kind == "ffn")
    others = sum(segment.nbytes for segment in mixtral.segments if segment.kind == "attention") + mixtral.head.nbytes
    assert mixtral.touched(1) == pytest.approx(others + experts / 4, rel=1e-6)
    assert mixtral.touched(2) == pytest.approx(others + experts * (1 - 0.75**2), rel=1e-6)
    assert mixtral.touched(200) == pytest.approx(others + experts, rel=1e-6)
    passed = sum(segment.passed for segment in mixtral.segments if segment.kind == "ffn")
    assert passed == pytest.approx(32 * 2 * 3 * 4096 * 14336, rel=1e-6)


def test_one_token_uses_a_quarter_of_experts_and_a_prompt_all(mixtral: NodeWork) -> None:
    machine = replace(LAPTOP, accelerator=None)
    one, long = (Tasks.of(mixtral, machine, StepSize(tokens, 1, 512)) for tokens in (1, 256))
    ffn = next(at for at, segment in enumerate(mixtral.segments) if segment.kind == "ffn")
    latency = machine.disk.latency
    assert (one.read[ffn, 0] - latency) * 4 == pytest.approx(long.read[ffn, 0] - latency, rel=1e-3)
    assert one.host[ffn, 0] < long.host[ffn, 0] / 4
    assert Tasks.of(mixtral, LAPTOP, StepSize(1, 1, 512)).up[ffn, 0] == long.up[ffn, 0]  # to a card goes all of it


def test_experts_leave_the_memory_before_attention(mixtral: NodeWork) -> None:
    attention = sum(segment.nbytes for segment in mixtral.segments if segment.kind == "attention")
    machine = replace(LAPTOP, accelerator=None, memory=mixtral.nbytes // 2)
    request = Workload(prompt=64, answer=16, sequences=1, context=512)
    chosen = choose(Problem(mixtral, machine, request, Needs(token=1), Limits())).offload
    lying = list(zip(mixtral.segments, chosen.residence, strict=True))
    assert {tier for segment, tier in lying if segment.kind == "attention"} == {"ram"}
    assert {tier for segment, tier in lying if segment.kind == "ffn"} == {"ram", "disk"}
    assert attention < machine.memory

"""`tpi plan --batch` prints the policy that the engine uses."""

from dataclasses import replace

from master.planning.batch import BatchReport
from scheduler.model.roofline.latency import throughput
from scheduler.model.roofline.search import best_policy
from tests.support.roofline import LLAMA, LLAMA_HEADS, paper


def test_keys_and_values_are_divided_where_host_reads_decide() -> None:
    """The accelerator nearly holds this dense model, so both sides attend, each with its heads."""
    problem = paper("l4", 64, 1024, LLAMA)
    problem = replace(problem, limits=replace(problem.limits, kv_heads=LLAMA_HEADS))
    report = BatchReport.on(problem)
    policy = report.forecast.policy
    assert 0.2 < policy.kv_kept < 0.8
    assert policy.kv_kept * LLAMA_HEADS == round(policy.kv_kept * LLAMA_HEADS)
    assert not policy.attention_there
    for side in ("ram", "gpu"):
        whole = best_policy(replace(problem, limits=replace(problem.limits, kv=side))).policy
        assert report.forecast.rate > 1.1 * throughput(problem, whole)
    (said,) = (line for line in report.lines() if "(r_c)" in line)
    assert "attention with keys and values in RAM on the CPU" in said
    assert f"{policy.kv_kept:.0%} of the keys and values (r_c), with which the GPU attends" in said


def test_where_dividing_brings_nothing_they_are_on_one_side() -> None:
    problem = paper("t4", 504)
    report = BatchReport.on(replace(problem, limits=replace(problem.limits, kv_heads=8)))
    assert report.forecast.policy.kv_kept == 0
    assert not [line for line in report.lines() if "r_c" in line]

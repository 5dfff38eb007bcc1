"""The policy of a batch compared with all policies of a grid, on small machines."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scheduler.model.machine import SHARERS, KvRates, Rates, emulated_node
from scheduler.model.offload.work import REQUEST_PHASES
from scheduler.model.roofline.latency import (
    PolicyPoint,
    accelerator_bytes,
    host_bytes,
    most_weights,
    roofs,
    seconds,
    throughput,
    without_partial_ffn,
)
from scheduler.model.roofline.policy import BatchPolicy, BatchProblem
from scheduler.model.roofline.search import GAP, best_policy
from tests.support.roofline import LLAMA, fits, paper, problems
from tpi.devices.emulated.machine import parse_emulated
from tpi.errors import PlanError

STEPS = 5  # of each share in the grid


def allowed(problem: BatchProblem, policy: BatchPolicy) -> bool:
    limits, kept, disk = problem.limits, policy.weights_kept, policy.weights_on_disk
    weights = {None: True, "ram": kept + disk == 0, "disk": disk == 1 and kept == 0, "gpu": True}[limits.weights]
    kv = {None: True, "ram": policy.kv_kept == 0, "gpu": policy.attention_there and policy.kv_kept == 1}[limits.kv]
    return weights and kv


def kv_shares(problem: BatchProblem, attention: bool, ffn: bool) -> list[float]:
    """Return shares of keys and values on the accelerator: all if it attends, some if it computes heads."""
    every: list[float] = np.linspace(0, 1, (problem.limits.kv_heads or STEPS - 1) + 1).tolist()
    if attention:
        return every
    return every[:-1] if ffn else [0.0]


def every_policy(problem: BatchProblem, adds: bool) -> Iterator[BatchPolicy]:
    """Yield all policies on a grid of shares that fit; the accelerator or the host adds residual connections."""
    most = problem.request.most
    sizes = [(batch, parts) for batch in range(1, most + 1) for parts in range(1, batch + 1)]
    shares = np.linspace(0, 1, STEPS)
    for (batch, parts), attention, ffn in product(sizes, (False, True), (False, True)):
        upper = most_weights(problem, PolicyPoint(batch, parts, int(attention), int(ffn)))
        for kept, kv, disk in product(shares * upper, kv_shares(problem, attention, ffn), shares):
            policy = BatchPolicy(batch, parts, attention, ffn, float(kept), float(kv), float(disk), adds)
            if kept + disk <= 1 and allowed(problem, policy) and fits(problem, policy, 0.0):
                yield policy


@given(problems(), st.booleans())
@settings(max_examples=40)
def test_no_policy_of_the_grid_is_better(problem: BatchProblem, adds: bool) -> None:
    best = max((throughput(problem, policy) for policy in every_policy(problem, adds)), default=None)
    try:
        found = best_policy(problem).policy
    except PlanError:
        assert best is None
        return
    assert fits(problem, found)
    assert 0 <= found.weights_kept + found.weights_on_disk <= 1 + 1e-9
    assert found.batch <= problem.request.most
    heads = problem.limits.kv_heads
    assert not heads or found.kv_kept in {kept / heads for kept in range(heads + 1)}
    assert best is None or throughput(problem, found) >= best * (1 - 2 * GAP)


@given(
    problems(),
    st.lists(st.integers(0, 1), min_size=4, max_size=4),
    st.integers(1, 5),
    st.lists(st.floats(0, 1), min_size=3, max_size=3),
)
def test_times_and_memories_are_affine_in_the_shares(
    problem: BatchProblem, places: list[int], parts: int, shares: list[float]
) -> None:
    """The linear program gets only their values at the corners."""
    attention, ffn, adds, divided = places
    base = PolicyPoint(5, parts, attention, ffn, adds=adds, divided=divided)
    corners = [base, replace(base, weights=1.0), replace(base, kv=1.0), replace(base, disk=1.0)]
    point = replace(base, weights=shares[0], kv=shares[1], disk=shares[2])

    def mixed(values: list[float]) -> float:
        return values[0] + sum(share * (value - values[0]) for share, value in zip(shares, values[1:], strict=True))

    for phase in REQUEST_PHASES:
        of_corners = [roofs(problem, corner, phase) for corner in corners]
        for name, value in roofs(problem, point, phase).items():
            assert float(value) == pytest.approx(mixed([float(each[name]) for each in of_corners]), rel=1e-9, abs=1e-6)
    for memory in (host_bytes, accelerator_bytes):
        expected = mixed([float(memory(problem, corner)) for corner in corners])
        assert float(memory(problem, point)) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(("preset", "micro_batch"), [("t4", 36), ("l4", 64)])
def test_the_papers_setting_gets_the_papers_policy(preset: str, micro_batch: int) -> None:
    """Attention on the CPU, experts on the GPU (section 4.2), micro-batches of about its size (tables 4 and 5)."""
    problem = paper(preset, 504)
    found = best_policy(problem).policy
    assert (found.attention_there, found.ffn_there, found.weights_on_disk) == (False, True, 0)
    assert found.batch == 504
    assert micro_batch / 2 <= found.micro_batch <= 2 * micro_batch
    busy = {name: float(value) for name, value in roofs(problem, PolicyPoint.of(found), "decode").items()}
    assert max(busy, key=lambda name: busy[name]) == "up"


@given(problems())
def test_neurons_are_cut_where_the_link_needs_it_alone(problem: BatchProblem) -> None:
    """Two calls instead of one pay off if fewer bytes are copied. The choice always fits, and is not slower."""
    try:
        policy = best_policy(problem).policy
    except PlanError:
        assume(False)
    found = without_partial_ffn(problem, policy)
    assert found == policy or not problem.layer.routed_bytes  # experts are one call wherever they lie
    share = problem.layer.attention_bytes / problem.layer.nbytes
    assert found.weights_kept in (policy.weights_kept, share, 0.0)
    assert fits(problem, found)
    assert replace(found, weights_kept=0.0) == replace(policy, weights_kept=0.0)
    if found != policy:
        busy = {name: float(value) for name, value in roofs(problem, PolicyPoint.of(policy), "decode").items()}
        light = {name: float(value) for name, value in roofs(problem, PolicyPoint.of(found), "decode").items()}
        assert light["up"] > busy["up"]


def test_resident_weights_are_cut_only_on_a_slow_link() -> None:
    """Holds for dense neurons; blocks of experts may be cut anyway."""
    mixture = paper("t4", 504)
    neurons = replace(mixture.layer, ffn_bytes=mixture.layer.routed_bytes, ffn_weights=mixture.layer.routed_weights / 4)
    problem = replace(mixture, layer=replace(neurons, routed_bytes=0.0, routed_weights=0.0, experts=1, used=1))
    device = problem.machine.accelerator
    assert device is not None
    policy = best_policy(problem).policy
    assert without_partial_ffn(problem, policy) == policy
    fast = replace(device, link=replace(device.link, up=1e12, down=1e12))
    quick = replace(problem, machine=replace(problem.machine, accelerator=fast))
    whole = problem.layer.attention_bytes / problem.layer.nbytes
    assert without_partial_ffn(quick, policy) == replace(policy, weights_kept=whole)
    assert without_partial_ffn(replace(quick, layer=mixture.layer), policy) == policy
    little = replace(quick, machine=replace(quick.machine, memory=int(host_bytes(quick, PolicyPoint.of(policy)))))
    assert without_partial_ffn(little, policy) == policy  # RAM has no room for what would no longer stay


def test_a_fast_accelerator_with_the_kv_cache_attends_itself() -> None:
    """Figure 10: with a slow CPU and enough memory, keys and values stay on the accelerator."""
    problem = paper("pc-high", 64, prompt=512)
    device = problem.machine.accelerator
    assert device is not None
    large = replace(problem.machine, accelerator=replace(device, memory=160 << 30), host=Rates(10e9, 0.1e12))
    found = best_policy(replace(problem, machine=large)).policy
    assert (found.attention_there, found.ffn_there) == (True, True)
    assert found.kv_kept > 0.9


def test_what_fits_nowhere_is_refused_with_a_way_out() -> None:
    small = replace(paper("t4", 8), machine=replace(emulated_node(parse_emulated("t4")), memory=1 << 28))
    with pytest.raises(PlanError, match="--memory or --gpu-memory"):
        best_policy(small)


def test_few_pairs_are_solved_for() -> None:
    """A bound excludes the others, so a search takes less than a second; the paper reports a minute."""
    choice = best_policy(paper("t4", 4096))
    assert choice.compared > 1000
    assert choice.solved <= 3
    assert seconds(paper("t4", 4096), choice.policy) > 0


@pytest.mark.parametrize("heads", [0, 1, 8])
def test_few_pairs_are_solved_for_where_the_disk_decides(heads: int) -> None:
    """Both memories together leave a share of the weights on disk; the bound must know it to separate pairs."""
    problem = paper("rtx3060-laptop", 512)
    problem = replace(problem, limits=replace(problem.limits, kv_heads=heads))
    choice = best_policy(problem)
    busy = {name: float(value) for name, value in roofs(problem, PolicyPoint.of(choice.policy), "decode").items()}
    assert max(busy, key=lambda name: busy[name]) == "disk"
    assert choice.compared > 1000
    assert choice.solved <= 3


@pytest.mark.parametrize("sharers", [SHARERS, 4 * SHARERS])
def test_attention_on_the_host_takes_what_was_measured_of_it(sharers: int) -> None:
    """It may be slower than reading, by a factor that grows with the query heads that share keys and values."""
    problem, at = paper("l4", 100), PolicyPoint(100, 10, 0, 1)
    values = (problem.layer.heads - problem.layer.mixed) / 2
    layer = replace(problem.layer, kv_dtype="q8", mixed=sharers * values, heads=(sharers + 2) * values)
    host = replace(problem.machine.host, start=0.0)

    def seconds_with(kv: KvRates | None) -> float:
        machine = replace(problem.machine, host=replace(host, kv=kv))
        return float(roofs(replace(problem, layer=layer, machine=machine), at, "decode")["host"])

    reading, nbytes = host.read, 100 * problem.request.context * layer.kv_token
    assert seconds_with(None) == pytest.approx(nbytes / reading)
    assert seconds_with(KvRates(1, 1, 64 * reading, 1)) == pytest.approx(nbytes / reading)
    slow = KvRates(1, 1, reading / 2, 1)
    assert seconds_with(slow) == pytest.approx(2 * nbytes / reading * sharers / SHARERS)


@pytest.mark.parametrize(("preset", "most"), [("rtx3060-laptop", 512), ("t4", 2000)])
def test_no_batch_size_between_those_compared_is_better(preset: str, most: int) -> None:
    """With many requests not every batch size is compared. More requests are never answered more slowly."""
    problem = paper(preset, most)
    best = best_policy(problem).policy
    fastest = throughput(problem, best)
    for batch in {*np.linspace(most // 8, most, 24).astype(int).tolist(), best.batch - 1, min(best.batch + 1, most)}:
        with suppress(PlanError):  # it may be too many
            one = best_policy(replace(problem, limits=replace(problem.limits, batch=batch))).policy
            assert throughput(problem, one) <= fastest * (1 + 2 * GAP), (batch, best)
    assert throughput(problem, best_policy(paper(preset, most // 2)).policy) <= fastest * (1 + 2 * GAP)


def test_layers_with_a_window_attend_to_no_more_than_that() -> None:
    """Every other layer of gpt-oss has a window of 128 tokens; all pages of a sequence are copied nevertheless."""
    full = paper("t4", 64, 4000)
    some = replace(full, layer=replace(full.layer, windows=(128, 0) * (full.layer.layers // 2)))
    context = full.request.context
    share = (128 + context) / 2 / context
    for attention, resource in ((0, "host"), (1, "accelerator")):
        at = PolicyPoint(64, 4, attention, 1)
        before, after = (float(roofs(each, at, "decode")[resource]) for each in (full, some))
        none = float(roofs(replace(full, layer=replace(full.layer, windows=(1,))), at, "decode")[resource])
        assert (after - none) / (before - none) == pytest.approx(share, rel=1e-3)
    up = [roofs(each, PolicyPoint(64, 4, 1, 1), "decode")["up"] for each in (full, some)]
    assert up[0] == up[1]


def test_divided_keys_and_values_share_work_and_memory() -> None:
    """The host attends with the half in RAM, half of the bytes are copied, and the accelerator makes one more call."""
    problem = paper("l4", 100, layer=LLAMA)
    layer, device = problem.layer, problem.machine.accelerator
    assert device is not None
    none, half = PolicyPoint(100, 10, 0, 1), PolicyPoint(100, 10, 0, 1, kv=0.5, divided=1)
    before, after = (roofs(problem, at, "decode") for at in (none, half))
    starts = 10 * problem.machine.host.start
    assert float(after["host"]) - starts == pytest.approx((float(before["host"]) - starts) / 2)
    read = 50 * problem.request.context * layer.kv_token / device.rates.read
    assert float(after["accelerator"] - before["accelerator"]) == pytest.approx(10 * device.rates.start + read)
    assert float(before["up"] - after["up"]) == pytest.approx(50 * layer.mixed / device.link.up)
    assert float(before["down"] - after["down"]) == pytest.approx(50 * layer.heads / device.link.down)
    pages = 50 * layer.layers * problem.request.room * layer.kv_token
    rooms = 10 * problem.request.room * layer.kv_token  # two micro-batches of 10, half of each
    here, there = (float(size(problem, none)) - float(size(problem, half)) for size in (host_bytes, accelerator_bytes))
    assert here == pytest.approx(pages + rooms)
    assert there == pytest.approx(rooms - pages)

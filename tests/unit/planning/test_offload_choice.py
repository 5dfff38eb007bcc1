"""The search for a configuration: no possible one is better than the chosen one."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.model.machine import Accelerator, DeviceLink, DiskRate, NodeMachine, Rates
from scheduler.model.offload.choice import OffloadChoice, choose
from scheduler.model.offload.fitting import with_gpu_memory
from scheduler.model.offload.memory import Needs, peaks
from scheduler.model.offload.problem import Limits, Problem
from scheduler.model.offload.tasks import Candidates, Tasks
from scheduler.model.offload.timeline import simulate_steps
from scheduler.model.offload.work import (
    KV_TIERS,
    PIPELINES,
    PLACES,
    REQUEST_PHASES,
    TIERS,
    KvTier,
    NodeWork,
    Offload,
    Pipeline,
    Place,
    RequestPhase,
    Tier,
    Workload,
)
from tests.support.devices.offload_cases import ATTENTION, MACHINE, layers
from tpi.errors import PlanError
from tpi.kernels.memory import CardMemoryNeed

MIB = 1 << 20
KV = 8  # bytes of one token's keys and values in a layer
FREE = Limits()
REQUEST = Workload(prompt=8, answer=4, sequences=1, context=32)
SIZES = st.integers(0, 24).map(lambda count: 50 * count)


@st.composite
def machines(draw: st.DrawFn, layer_count: int = 1) -> NodeMachine:
    """Draw machines whose memories hold from one segment to the whole model, with slow or fast rates."""
    slow_or_fast = st.sampled_from([50.0, 100.0, 200.0, 1000.0])
    rates = [Rates(draw(slow_or_fast), draw(st.sampled_from([3e3, 1e5]))) for _ in range(2)]
    link = DeviceLink(draw(slow_or_fast), draw(slow_or_fast), piece=10)
    device = Accelerator(rates[1], 100 + draw(SIZES), link)
    return NodeMachine(rates[0], 300 + 290 * layer_count + draw(SIZES), DiskRate(draw(slow_or_fast)), device)


def problem_of(machine: NodeMachine, layer_count: int = 1, limits: Limits = FREE) -> Problem:
    return Problem(layers(layer_count, KV), machine, REQUEST, Needs(token=1), limits)


def seconds_of(problem: Problem, chosen: Offload) -> float:
    """Return the seconds of the whole request, as the search counts them."""
    total = 0.0
    for phase in REQUEST_PHASES:
        size, count = problem.step(phase)
        tasks = Tasks.of(problem.work, problem.machine, size)
        candidates = Candidates.of(problem.work, [chosen], phase)
        steps = min(count, 2)
        found = simulate_steps(tasks, candidates, problem.work.blocks, chosen.pipeline, steps).steps
        total += float(found.sum()) * count / steps
    return total


def fits(problem: Problem, chosen: Offload) -> bool:
    device = problem.machine.accelerator
    assert device is not None
    found = peaks(problem.work, chosen, problem.request, problem.needs, problem.chunk)
    return found.accelerator.total <= device.memory and found.host.total <= problem.machine.memory


def everything(problem: Problem) -> Iterator[Offload]:
    """Yield every residence and place of computing of each segment, with each place of the pages and each pipeline."""
    work = problem.work
    for residence in product(TIERS, repeat=len(work.segments)):
        choices = [("accelerator",) if tier == "gpu" else PLACES for tier in residence]
        for kv, pipeline, prompt in product(KV_TIERS, PIPELINES, product(*choices)):
            for decode in product(*choices):
                chosen = Offload(residence, prompt, decode, kv, pipeline)
                if (kv == "ram" or attends_there(problem, chosen)) and one_reader(chosen):
                    yield chosen


def one_reader(chosen: Offload) -> bool:
    """Return True if nothing is on disk, or if a step computes all segments that are not on the card in one place."""
    outside = [number for number, tier in enumerate(chosen.residence) if tier != "gpu"]
    places = [{chosen.places(phase)[number] for number in outside} for phase in REQUEST_PHASES]
    return "disk" not in chosen.residence or all(len(each) == 1 for each in places)


def attends_there(problem: Problem, chosen: Offload) -> bool:
    places = zip(problem.work.segments, chosen.prompt, chosen.decode, strict=True)
    return all({prompt, decode} == {"accelerator"} for segment, prompt, decode in places if segment.kv_token)


@settings(deadline=None, max_examples=30)
@given(machines())
def test_nothing_that_fits_is_faster(machine: NodeMachine) -> None:
    """All configurations of one layer are tried."""
    problem = problem_of(machine)
    found = choose(problem)
    assert fits(problem, found.offload)
    assert found.seconds == pytest.approx(seconds_of(problem, found.offload), rel=1e-5)
    best = min(seconds_of(problem, each) for each in everything(problem) if fits(problem, each))
    assert found.seconds <= best * 1.0001


@pytest.mark.parametrize("room", [400, 700, 1200, 5000])
def test_at_equal_times_most_weights_are_kept_on_the_card(room: int) -> None:
    """If exchanges take nearly all of the time, as over Wi-Fi, streaming gains nothing."""
    fast = Rates(1e12, 1e15)
    machine = NodeMachine(fast, 1 << 20, DiskRate(1e12), Accelerator(fast, room, DeviceLink(1e12, 1e12, piece=10)))
    problem = replace(problem_of(machine), exchange=1.0)
    found = choose(problem)
    fitting = [each for each in everything(problem) if fits(problem, each)]
    assert found.seconds == pytest.approx(choose(replace(problem, limits=Limits("ram"))).seconds, rel=1e-6)
    assert staying(problem, found.offload) == max(staying(problem, each) for each in fitting) > 0


@settings(deadline=None, max_examples=60)
@given(machines(3), st.integers(0, 3))
def test_a_chip_with_host_memory_shares_the_hosts_budget(machine: NodeMachine, more: int) -> None:
    card = machine.accelerator
    assert card is not None
    shared = replace(
        machine, accelerator=replace(card, shared=True, memory=1 << 20), memory=machine.memory + 300 * more
    )
    problem = problem_of(shared, 3)
    found = choose(problem).offload
    taken = peaks(problem.work, found, problem.request, problem.needs, problem.chunk)
    assert taken.accelerator.total + taken.host.total <= shared.memory


def test_with_memory_for_all_a_shared_chip_may_keep_everything() -> None:
    card = replace(MACHINE.cards[0], shared=True, memory=1 << 40)
    found = chosen(Limits("gpu", "gpu"), replace(MACHINE, accelerator=card, memory=1 << 40))
    assert set(found.offload.residence) == {"gpu"}
    with pytest.raises(PlanError, match=r"--memory \d+MiB would do"):
        choose(large(Limits("gpu", "gpu"), replace(MACHINE, accelerator=card, memory=4 * MIB)))


def staying(problem: Problem, chosen: Offload) -> int:
    """Return the bytes of resident weights, keys and values on the accelerator."""
    taken = peaks(problem.work, chosen, problem.request, problem.needs, problem.chunk).accelerator
    return taken.weights + (taken.kv if chosen.kv == "gpu" else 0)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.data())
def test_more_of_anything_is_never_slower(count: int, data: st.DataObject) -> None:
    machine = data.draw(machines(count))
    before = choose(problem_of(machine, count)).seconds
    better = data.draw(st.sampled_from(list(improved(machine))))
    assert choose(problem_of(better, count)).seconds <= before * 1.0001


def improved(machine: NodeMachine) -> Iterator[NodeMachine]:
    """Return the machine with more of one resource."""
    device = machine.accelerator
    assert device is not None
    yield replace(machine, memory=machine.memory + 100)
    yield replace(machine, memory=machine.memory + 1000)
    yield replace(machine, disk=DiskRate(machine.disk.read * 1.3))
    yield replace(machine, host=Rates(machine.host.read * 1.3, machine.host.operations))
    yield replace(machine, host=Rates(machine.host.read, machine.host.operations * 1.3))
    for better in (
        replace(device, memory=device.memory + 100),
        replace(device, memory=device.memory + 700),
        replace(device, link=replace(device.link, up=device.link.up * 1.3)),
        replace(device, link=replace(device.link, down=device.link.down * 1.3)),
        replace(device, rates=Rates(device.rates.read * 1.3, device.rates.operations)),
    ):
        yield replace(machine, accelerator=better)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.data())
def test_what_was_chosen_fits_and_takes_as_long_as_it_says(count: int, data: st.DataObject) -> None:
    problem = problem_of(data.draw(machines(count)), count)
    found = choose(problem)
    assert fits(problem, found.offload)
    assert one_reader(found.offload)
    assert found.seconds == pytest.approx(seconds_of(problem, found.offload), rel=1e-5)


@pytest.mark.parametrize("prompt", [None, *PLACES])
@pytest.mark.parametrize("decode", [None, *PLACES])
@pytest.mark.parametrize("kv", KV_TIERS)
def test_what_a_disk_streams_is_computed_in_one_place(kv: KvTier, prompt: Place | None, decode: Place | None) -> None:
    """If attention must be computed on the accelerator, neurons are too, because the disk has one reader."""
    found = chosen(Limits("disk", kv, prompt=prompt, decode=decode), count=3).offload
    assert one_reader(found)
    if kv == "ram":
        assert prompt is None or set(found.prompt) == {prompt}
        assert decode is None or set(found.decode) == {decode}
    else:
        assert set(found.prompt + found.decode) == {"accelerator"}


@settings(deadline=None, max_examples=6)
@given(
    st.sampled_from([None, *TIERS]), st.sampled_from([None, *KV_TIERS]), st.sampled_from([None, *PIPELINES]),
    st.integers(0, 2 * MIB), st.integers(1, 4), st.integers(0, 2000),
)  # fmt: skip
def test_the_memory_a_refusal_names_is_the_least_that_works(
    weights: Tier | None, kv: KvTier | None, pipeline: Pipeline | None, reserve: int, context: int, token: int
) -> None:
    """It includes memory for rounding and for the buffers of kernels."""
    limits = Limits(weights, kv, pipeline, "accelerator", "accelerator")
    needs = Needs(1, card=CardMemoryNeed(token, 3 * token, 999))
    asked = replace(large(limits, BIG, 32 * context), reserve=reserve, needs=needs)
    with pytest.raises(PlanError, match=r"--gpu-memory \d+MiB would do") as refused:
        choose(with_gpu_memory(asked, 0))
    least = int(str(refused.value).split("--gpu-memory ")[1].split("MiB")[0])
    choose(with_gpu_memory(asked, least))
    with pytest.raises(PlanError, match=f"--gpu-memory {least}MiB would do"):
        choose(with_gpu_memory(asked, least - 1))


def chosen(limits: Limits, machine: NodeMachine = MACHINE, count: int = 2) -> OffloadChoice:
    return choose(problem_of(machine, count, limits))


@pytest.mark.parametrize("tier", TIERS)
def test_weights_lie_where_the_user_says(tier: Tier) -> None:
    assert set(chosen(Limits(weights=tier)).offload.residence) == {tier}


@pytest.mark.parametrize("kv", KV_TIERS)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_so_do_keys_and_values_and_so_does_the_pipeline(kv: str, pipeline: str) -> None:
    found = chosen(Limits(kv=kv, pipeline=pipeline)).offload  # type: ignore[arg-type]
    assert (found.kv, found.pipeline) == (kv, pipeline)
    assert kv == "ram" or attends_there(problem_of(MACHINE, 2), found)


def test_without_an_accelerator_the_host_computes() -> None:
    found = chosen(Limits(), replace(MACHINE, accelerator=None)).offload
    assert set(found.prompt) == set(found.decode) == {"host"}
    assert set(found.residence) == {"ram"}


def test_prompts_go_to_the_accelerator_and_tokens_to_the_weights() -> None:
    """The link is slower than the host's memory, and the accelerator has a hundred times the arithmetic."""
    device = Accelerator(Rates(1000.0, 1e8), 1100, DeviceLink(50.0, 50.0, piece=10))
    machine = NodeMachine(Rates(100.0, 1e4), 10_000, DiskRate(50.0), device, bus=90.0)
    work = NodeWork(tuple(replace(each, pair=0) for each in layers(4).segments), 0)
    found = choose(Problem(work, machine, Workload(512, 64, 1, 1024), Needs(0), Limits("ram", "ram"))).offload
    places: dict[RequestPhase, set[Place]] = {phase: set(found.places(phase)) for phase in REQUEST_PHASES}
    assert places == {"prompt": {"accelerator"}, "decode": {"host"}}


BIG = replace(
    MACHINE,
    memory=40 * MIB,
    accelerator=Accelerator(Rates(1e12, 1e15), 4 * MIB, DeviceLink(1e9, 1e9, piece=10)),
)


def large(limits: Limits, machine: NodeMachine, context: int = 32) -> Problem:
    """Return two layers of 2 and 6 MiB."""
    work = layers(2, 2 << 10)
    scaled = tuple(replace(each, nbytes=each.nbytes * 2 * MIB // ATTENTION) for each in work.segments)
    request = replace(REQUEST, context=context)
    return Problem(replace(work, segments=scaled), machine, request, Needs(token=1), limits)


@pytest.mark.parametrize(
    ("limits", "flag"),
    [
        (Limits(weights="gpu"), "--gpu-memory"),
        (Limits(kv="gpu", weights="ram"), "--gpu-memory"),
        (Limits(weights="ram"), "--memory"),
        (Limits(weights="disk"), "--memory"),
        (Limits(), "--memory"),
    ],
)
def test_a_refusal_names_the_smallest_setting_that_would_do(limits: Limits, flag: str) -> None:
    assert BIG.accelerator is not None
    small = replace(BIG, accelerator=replace(BIG.accelerator, memory=MIB // 2))
    machine = replace(small, memory=MIB) if flag == "--memory" else small
    with pytest.raises(PlanError, match=f"{flag} ([0-9]+)MiB would do") as refused:
        choose(large(limits, machine))
    least = int(str(refused.value).split(f"{flag} ")[1].split("MiB")[0])

    def of(size: int) -> NodeMachine:
        if flag == "--memory":
            return replace(machine, memory=size * MIB)
        assert machine.accelerator is not None
        return replace(machine, accelerator=replace(machine.accelerator, memory=size * MIB))

    choose(large(limits, of(least)))
    with pytest.raises(PlanError):
        choose(large(limits, of(least - 1)))


def test_where_both_memories_are_too_small_both_are_named() -> None:
    assert BIG.accelerator is not None
    machine = replace(BIG, memory=MIB // 4, accelerator=replace(BIG.accelerator, memory=MIB // 4))
    with pytest.raises(PlanError, match=r"--memory \d+MiB with --gpu-memory \d+MiB would do"):
        choose(large(Limits(kv="gpu", weights="ram"), machine))


def test_without_an_accelerator_nothing_lies_on_one() -> None:
    with pytest.raises(PlanError, match="--weights gpu needs an accelerator"):
        chosen(Limits(weights="gpu"), replace(MACHINE, accelerator=None))

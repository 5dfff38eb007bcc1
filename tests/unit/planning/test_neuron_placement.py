"""The placement of neurons: as good as the best of all, within PowerInfer's constraints, and fast for large models."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.model.machine import parse_machine
from scheduler.model.neurons.problem import BATCH, ComputingUnit, LayerNeurons, NeuronProblem
from scheduler.model.neurons.solve import NeuronPlacement, place_neurons
from tpi.errors import PlanError


@st.composite
def problems(draw: st.DrawFn) -> NeuronProblem:
    """Draw up to three layers of up to three batches; the CPU holds all or almost all neurons."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    sizes = draw(st.lists(st.integers(1, 3 * BATCH), min_size=1, max_size=3))
    layers = [
        LayerNeurons(random.random(size) ** 3, draw(st.integers(1, 40)), draw(st.sampled_from([0, 300])))
        for size in sizes
    ]
    total = sum(len(one.frequency) * one.neuron_bytes + one.predictor_bytes for one in layers)
    cpu, accelerator = (int(total * draw(st.floats(0, 1.2))) for _ in range(2))
    speeds = draw(st.integers(1, 10)), draw(st.integers(1, 40))
    return NeuronProblem(
        layers, ComputingUnit(cpu, speeds[0]), ComputingUnit(accelerator, speeds[1]), draw(st.integers(0, 400))
    )


def best_of_all(problem: NeuronProblem) -> float | None:
    """Return the largest impact of all placements that satisfy inequalities 4 to 8; None if there is none."""
    best, total = None, sum(len(o.frequency) * o.neuron_bytes + o.predictor_bytes for o in problem.layers)
    choices = [list(product([0, 1], repeat=len(one.batches) + 1)) for one in problem.layers]
    for choice in product(*choices):
        taken, impact = 0, 0.0
        for (*marks, kept), layer in zip(choice, problem.layers, strict=True):
            chosen = [batch for batch, mark in zip(layer.batches, marks, strict=True) if mark]
            count = sum(map(len, chosen))
            if not repays(problem, layer, count) or (kept and not count):
                break
            taken += count * layer.neuron_bytes + kept * layer.predictor_bytes
            impact += sum(layer.frequency[batch].sum() for batch in chosen) + kept * layer.predictor_impact
        else:
            if taken <= problem.accelerator.capacity and total - taken <= problem.cpu.capacity:
                best = max(impact, best or 0.0)
    return best


def repays(problem: NeuronProblem, layer: LayerNeurons, count: int) -> bool:
    """Return True if a number of neurons satisfies inequality 4, with times by equation 5."""
    there = count * layer.neuron_bytes / problem.accelerator.bandwidth + problem.sync
    return not count or there <= count * layer.neuron_bytes / problem.cpu.bandwidth + 1e-9


def check(problem: NeuronProblem, placed: NeuronPlacement) -> None:
    """Check constraints 4 to 8 for the placement."""
    total = sum(len(o.frequency) * o.neuron_bytes + o.predictor_bytes for o in problem.layers)
    assert placed.nbytes(problem) <= problem.accelerator.capacity
    assert total - placed.nbytes(problem) <= problem.cpu.capacity
    for neurons, kept, layer in zip(placed.neurons, placed.predictors, problem.layers, strict=True):
        assert repays(problem, layer, len(neurons))
        assert len(neurons) or not kept
        assert len(np.unique(neurons)) == len(neurons)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_a_placement_is_optimal_and_keeps_every_constraint(problem: NeuronProblem) -> None:
    best = best_of_all(problem)
    if best is None:
        with pytest.raises(PlanError, match="do not fit"):
            place_neurons(problem)
        return
    placed = place_neurons(problem, gap=0)
    check(problem, placed)
    assert placed.impact == pytest.approx(best, rel=1e-5, abs=1e-5)


def test_an_exchange_that_nothing_repays_leaves_all_on_the_cpu() -> None:
    layer = LayerNeurons(np.full(256, 0.5), 1000)
    problem = NeuronProblem([layer], ComputingUnit(1 << 20, 1e9), ComputingUnit(1 << 20, 2e9), 1.0)
    assert problem.least == (None,)
    assert not len(place_neurons(problem).neurons[0])


def test_an_exchange_that_all_neurons_just_repay_is_allowed() -> None:
    """54 neurons of 32 bytes take 576 s on the CPU, and as long on the accelerator with the exchange of 360 s."""
    layer = LayerNeurons(np.full(54, 0.5), 32)
    problem = NeuronProblem([layer], ComputingUnit(0, 3), ComputingUnit(1728, 8), 360)
    assert problem.least == (54,)
    assert len(place_neurons(problem).neurons[0]) == 54


def test_a_model_of_7b_is_placed() -> None:
    """32 layers of 11008 neurons in 4 bits, half of which fit.

    The greedy solution of the relaxation is an upper bound.
    """
    law = np.arange(1, 11009) ** -0.7
    layers = [LayerNeurons(np.minimum(law * (5 + at), 0.9), 6912) for at in range(32)]
    half = 16 * 11008 * 6912
    problem = NeuronProblem(layers, ComputingUnit(4 * half, 20e9), ComputingUnit(half, 300e9), 50e-6)
    placed = place_neurons(problem)
    check(problem, placed)
    batches = np.sort(np.concatenate([one.impacts for one in layers]))[::-1]
    assert placed.impact >= 0.9995 * batches[: half // (BATCH * 6912)].sum()


def test_a_machine_as_it_was_measured() -> None:
    machine = parse_machine("1GiB GPU, 300GB/s GPU, 8GiB RAM, 20GB/s RAM")
    layer = LayerNeurons(np.linspace(1, 0, 11008), 6912)
    problem = NeuronProblem.of([layer], machine, 1 << 30, 1 << 29)
    assert problem.accelerator == ComputingUnit(1 << 29, 300e9)
    assert problem.cpu == ComputingUnit(7 << 30, 20e9)
    assert problem.sync > 0
    assert len(place_neurons(problem).neurons[0]) == 11008
    with pytest.raises(PlanError, match="accelerator"):
        NeuronProblem.of([layer], parse_machine("8GiB RAM"))

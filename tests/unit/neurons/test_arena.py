"""Neurons that migrate while others are computed, in 200 drawn timings of the copies; failures; counts."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import pytest

from scheduler.neurons.arena import NeuronArena
from scheduler.neurons.costs import LineCost
from scheduler.neurons.layer import HeldNeurons
from scheduler.neurons.layout import ArenaLayer, arena_bytes, arena_layer
from scheduler.neurons.migration import STATIC, MigrationSettings
from scheduler.neurons.thresholds import F32
from scheduler.slots.table import Marks
from scheduler.transfer.queue import TransferQueue
from tests.support.devices.shuffled import Shuffled
from tests.support.kernels.kernel_cases import native
from tests.support.slots import table_faults
from tpi.devices.base import Pending
from tpi.devices.pages import PAGE, Bytes, round_up
from tpi.errors import PlanError

SEEDS = range(200)
LAYERS, NEURONS, RECORD = 3, 256, 24


def records(layer: int) -> Bytes:
    """Return records whose bytes all tell the number of their neuron."""
    numbers = (np.arange(NEURONS) * LAYERS + layer).astype(np.uint32)
    return np.repeat(numbers, RECORD // 4).view(np.uint8).reshape(NEURONS, RECORD)


def layers(random: np.random.Generator) -> list[ArenaLayer]:
    found = []
    for layer in range(LAYERS):
        frequency = random.random(NEURONS)
        hot = np.argsort(-frequency)[: 32 * int(random.integers(0, 5))].astype(np.int32)
        found.append(arena_layer(f"layer {layer}", records(layer), frequency, hot, float(random.choice([0.0, 0.5]))))
    return found


@contextmanager
def arena_of(
    seed: int, moving: MigrationSettings, failing: Callable[[int], bool] = lambda _: False
) -> Iterator[tuple[NeuronArena, Bytes, TransferQueue]]:
    with ExitStack() as stack:
        device = stack.enter_context(Shuffled(native, seed, failing))
        queue = stack.enter_context(closing(TransferQueue()))
        given = layers(np.random.default_rng(seed))
        memory = device.memory.allocate(PAGE + round_up(arena_bytes(given)))
        memory[arena_bytes(given) :] = 77
        arena = NeuronArena(device, memory, given, queue, moving)
        yield arena, memory, queue
        arena.wait()
        assert (memory[arena_bytes(given) :] == 77).all()  # the arena is never exceeded


def computed(arena: NeuronArena, layer: int, held: HeldNeurons, costs: tuple[LineCost, LineCost]) -> Pending[None]:
    """Read every held record at a time that the device chooses, check its number, and record drawn costs."""
    each = arena.layers[layer]
    data = each.data.reshape(-1, RECORD)
    each.record_accelerator_time(len(held.slots), costs[0].seconds(len(held.slots)))
    each.record_cpu_time(len(held.cpu_neurons), costs[1].seconds(len(held.cpu_neurons)))

    def call() -> None:
        try:
            assert (data[held.slots] == records(layer)[held.neurons]).all()
        finally:
            held.release()

    pending: Pending[None] = arena._device.start(call)
    return pending


def check_shares(held: HeldNeurons, there: Marks, scores: F32) -> None:
    """Check that each side computes its neurons above its threshold, and that the error is within the limit."""
    shares, chance = held.shares, 1 / (1 + np.exp(-scores.astype(float)))
    assert (
        held.neurons.tolist() == np.flatnonzero(there & (scores >= np.float32(shares.accelerator_threshold))).tolist()
    )
    assert held.cpu_neurons.tolist() == np.flatnonzero(~there & (scores >= np.float32(shares.cpu_threshold))).tolist()
    left_out = np.ones(NEURONS, bool)
    left_out[held.neurons] = left_out[held.cpu_neurons] = False
    change = chance[left_out].sum() - chance[scores < 0].sum()
    assert change == pytest.approx(shares.lost, abs=1e-9)
    assert shares.lost <= 1e-9


def drawn_costs(random: np.random.Generator) -> tuple[LineCost, LineCost]:
    """Return costs of the accelerator and of the CPU; either may be the slower one."""
    there, here = random.uniform(1e-7, 4e-6, 2).tolist()
    return LineCost(float(random.uniform(0, 1e-4)), there), LineCost(float(random.uniform(0, 1e-5)), here)


@pytest.mark.parametrize("seeds", [SEEDS[at : at + 40] for at in range(0, len(SEEDS), 40)], ids=str)
def test_nothing_computes_with_a_neuron_that_is_half_there(seeds: range) -> None:
    moved = balanced = 0
    for seed in seeds:
        random = np.random.default_rng(seed)
        costs = drawn_costs(random)
        with arena_of(seed, MigrationSettings(ahead=int(random.integers(1, 4)), balance=bool(seed % 2))) as (
            arena,
            _,
            _,
        ):
            pending: list[Pending[None]] = []
            for _ in range(8):
                arena.begin()
                for layer, each in enumerate(arena.layers):
                    foretold = arena.layers[(layer + 1) % LAYERS]
                    foretold.expect(np.flatnonzero(random.random(NEURONS) < 0.2).astype(np.int32))
                    scores = random.normal(-1, 2, NEURONS).astype(np.float32)
                    held = each.divide(scores, 0.0)
                    check_shares(held, each._there[1], scores)  # as it was seen under the lock
                    balanced += held.shares.accelerator_threshold != held.shares.cpu_threshold
                    each.count_active(np.sort(np.concatenate([held.neurons, held.cpu_neurons])))
                    pending.append(computed(arena, layer, held, costs))
            for each_pending in pending:
                each_pending.wait()
            arena.wait()
            moved += arena.figures.moved
            assert not any(table_faults(each.table) for each in arena.layers)
    assert moved > 0  # how many have time before the next step is up to the machine
    assert balanced > 100  # once costs are known, which takes half of the steps


def test_a_failed_move_is_raised_and_its_neurons_stay_on_the_cpu() -> None:
    broken = [False]
    with arena_of(3, MigrationSettings(), lambda _: broken[0]) as (arena, _, _):
        broken[0] = True
        layer = next(each for each in arena.layers if len(each.table))
        absent = np.flatnonzero(~layer.table.loaded)[:8].astype(np.int32)
        layer.expect(absent)
        arena.wait()
        with pytest.raises(OSError, match="failed"):
            arena.begin()
        assert not layer.table.loaded[absent].any()
        held = layer.divide_active(absent)
        assert held.cpu_neurons.tolist() == absent.tolist()
        arena.begin()  # once said, it is over


def test_static_moves_nothing() -> None:
    with arena_of(3, STATIC) as (arena, _, _):
        for each in arena.layers:
            before = each.table.unit_of.copy()
            each.expect(np.arange(NEURONS, dtype=np.int32))
            arena.wait()
            assert (each.table.unit_of == before).all()
        assert arena.figures.moves == 0


def test_a_neuron_predicted_repeatedly_becomes_resident() -> None:
    with arena_of(4, MigrationSettings()) as (arena, _, _):
        layer = next(each for each in arena.layers if len(each.table) > each.table.fixed)
        wanted = np.flatnonzero(~layer.table.loaded)[:8].astype(np.int32)
        for _ in range(20):
            arena.begin()
            layer.expect(wanted)
            layer.count_active(wanted)
            arena.wait()
        assert layer.table.loaded[wanted].all()
        assert arena.figures.moved < 20 * 8  # what is there does not move again


def test_chosen_neurons_are_cut_to_whole_units_from_the_coolest() -> None:
    frequency = np.linspace(1, 0, NEURONS)
    layer = arena_layer("layer", records(0), frequency, np.arange(70, dtype=np.int32)[::-1], 0.5)
    assert layer.hot.tolist() == list(range(64))
    assert layer.fixed == 32
    with pytest.raises(PlanError, match="run `tpi profile` again"):
        arena_layer("layer", records(0), frequency[1:], layer.hot)


@pytest.mark.parametrize("balance", [False, True])
def test_what_fills_the_last_unit_is_never_computed(balance: bool) -> None:
    scores = np.full(NEURONS - 20, 2.0, np.float32)
    scores[::2] = -1.0
    with arena_of(4, MigrationSettings(migrate=False, balance=balance)) as (arena, _, _):
        number = next(at for at, each in enumerate(arena.layers) if len(each.table))
        for _ in range(20):
            held = arena.layers[number].divide(scores, 0.0)
            assert max([*held.neurons, *held.cpu_neurons]) < len(scores)
            computed(arena, number, held, (LineCost(0.0, 1e-6), LineCost(0.0, 4e-6))).wait()

"""A node whose accelerator and CPU compute neurons together: the tokens of the dense run."""

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler.model.machine import LAPTOP, Accelerator, NodeMachine
from scheduler.neurons.migration import DYNAMIC, STATIC, MigrationSettings
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.neurons import SMALL, All, Exact, relu_packs, scorers
from tests.support.devices.offloading import answers, prompts
from tests.support.devices.opencl_device import opencl_device
from tests.support.devices.predicted import exact_predictors
from tests.support.slots import table_faults
from tests.support.weights.regular import NeuronUse, write_regular
from tests.support.weights.shapes import LLAMA_1B
from tpi.devices.base import Device
from tpi.devices.emulated.device import open_emulated
from tpi.errors import PlanError
from tpi.pack.reader import Pack
from worker.equipment import AcceleratorSetup
from worker.neurons import accelerated
from worker.neurons.accelerated import NeuronAccelerated
from worker.plan.choose import Choose
from worker.plan.modes.neurons import NeuronSetup, plan_on_accelerator

SHAPE: dict[str, Any] = LLAMA_1B | {
    "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip
CARD = "64MiB,stretch=1"


@pytest.fixture(scope="module")
def relu_pack(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pack]:
    return relu_packs(tmp_path_factory.mktemp("relu"))


def at_once() -> NodeMachine:
    """Return a laptop whose calls and copies begin at once; otherwise so small a model would never use both sides."""

    def begun(card: Accelerator) -> Accelerator:
        return replace(card, rates=replace(card.rates, start=0.0), link=replace(card.link, latency=0.0))

    return replace(LAPTOP.with_cards(begun), host=replace(LAPTOP.host, start=0.0))


def setup_of(pack: Pack, kind: type[Exact], moving: MigrationSettings) -> NeuronSetup:
    random = np.random.default_rng(3)
    frequency = {layer: random.random(pack.config.intermediate) for layer in range(pack.config.layers)}
    neurons = sum(block.shape.nbytes for _, block in pack.layers)
    return NeuronSetup(frequency, scorers=scorers(pack, kind), migration=moving, max_bytes=neurons // 2)


def sparse_answers(
    pack: Pack, cache: Path, device: Device, setup: NeuronSetup, asked: list[list[int]]
) -> tuple[list[list[int]], NeuronAccelerated]:
    decide: Choose = partial(plan_on_accelerator, setup=setup)
    accelerators: Mapping[int, AcceleratorSetup] = {0: AcceleratorSetup(device, at_once(), choose=decide)}
    with closing(in_process_deployment(pack, [1], cache, accelerators=accelerators, **SMALL)) as deployment:
        found = answers(deployment, asked, 12)
        link = deployment.node.link
        assert isinstance(link, NeuronAccelerated)
        assert link.arena is not None
        link.arena.wait()
        assert not any(table_faults(each.table) or each.table.pins.any() for each in link.arena.layers)
        return found, link


def dense_answers(pack: Pack, cache: Path, asked: list[list[int]]) -> list[list[int]]:
    with closing(in_process_deployment(pack, [1], cache, **SMALL)) as deployment:
        return answers(deployment, asked, 12)


CASES: list[tuple[str, type[Exact], MigrationSettings, str]] = [
    ("emulated", All, STATIC, "f32"),
    ("emulated", Exact, STATIC, "q4"),
    ("emulated", All, DYNAMIC, "q4"),
    ("emulated", Exact, DYNAMIC, "f32"),
    ("opencl", All, STATIC, "f32"),
    ("opencl", Exact, DYNAMIC, "q4"),
]


@pytest.mark.parametrize(("device", "kind", "moving", "dtype"), CASES)
def test_tokens_equal_the_dense_run(
    device: str,
    kind: type[Exact],
    moving: MigrationSettings,
    dtype: str,
    relu_pack: Callable[[str], Pack],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        accelerated, "measure_limit", lambda *_: inf
    )  # predictors that name all neurons are believed, too
    pack = relu_pack(dtype)
    with closing(open_emulated(CARD)) if device == "emulated" else opencl_device() as card:
        for asked in ([prompt] for prompt in prompts(pack.config.vocab, 2, seed=5, longest=12)):
            found, link = sparse_answers(pack, tmp_path / "sparse", card, setup_of(pack, kind, moving), asked)
            assert found == dense_answers(pack, tmp_path / "dense", asked)
    assert link.arena is not None
    figures = link.arena.figures
    assert 0 < figures.active_on_accelerator < figures.active
    assert (figures.moved > 0) == (moving.migrate and kind is Exact)  # where all are active the hottest stay
    said = re.match(r"\S+.* holds (\d+) of (\d+) other blocks and (\d+) of (\d+) neurons; ", link.describe())
    assert said is not None
    layers, neurons = pack.config.layers, pack.config.layers * pack.config.intermediate
    assert [int(said[at]) for at in (2, 4)] == [layers, neurons]


def test_sequences_share_a_union_and_long_steps_are_dense(relu_pack: Callable[[str], Pack], tmp_path: Path) -> None:
    pack = relu_pack("f32")
    asked = prompts(pack.config.vocab, 3, seed=8, longest=30)
    with closing(open_emulated(CARD)) as card:
        found, link = sparse_answers(pack, tmp_path / "sparse", card, setup_of(pack, Exact, DYNAMIC), asked)
    assert found == dense_answers(pack, tmp_path / "dense", asked)
    assert link.arena is not None
    assert link.arena.figures.active > 0


def test_an_accelerator_too_small_for_attention_is_refused(relu_pack: Callable[[str], Pack], tmp_path: Path) -> None:
    pack = relu_pack("f32")
    with (
        closing(open_emulated("1MiB,stretch=1")) as card,
        pytest.raises(PlanError, match="--gpu-memory, or add --sparsity off"),
    ):
        sparse_answers(pack, tmp_path, card, setup_of(pack, Exact, DYNAMIC), [[3, 4]])


@pytest.mark.parametrize("sparsity", ["static", "dynamic"])
def test_a_group_of_three_of_which_two_have_accelerators(
    sparsity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predictors come with the plan. Each node places and schedules its own neurons."""
    monkeypatch.setattr(accelerated, "measure_limit", lambda *_: inf)
    pack = write_regular(tmp_path / "pack", SHAPE, NeuronUse(rank=32), "f32")
    predictors, asked = exact_predictors(pack), prompts(pack.config.vocab, 1, seed=4, longest=12)
    with ExitStack() as stack:
        cards = {rank: stack.enter_context(closing(open_emulated(CARD))) for rank in (0, 2)}
        accelerators = {rank: AcceleratorSetup(card, at_once()) for rank, card in cards.items()}
        more: dict[str, Any] = {"accelerators": accelerators, "predictors": predictors, "sparsity": sparsity, **SMALL}
        made = in_process_deployment(pack, [2, 1, 1], tmp_path / "sparse", **more)
        deployment = stack.enter_context(closing(made))
        assert answers(deployment, asked, 12) == dense_answers(pack, tmp_path / "dense", asked)
        link = deployment.node.link
        assert isinstance(link, NeuronAccelerated)
        assert link.arena is not None
        assert link.arena.figures.active_on_accelerator > 0
        assert link.arena.migration.migrate == (sparsity == "dynamic")

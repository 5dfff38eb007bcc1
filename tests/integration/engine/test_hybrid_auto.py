"""`--sparsity auto` with an accelerator: all neurons or only active ones, as the forecasts of both plans decide."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.model.machine import LAPTOP, Accelerator, NodeMachine
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.neurons import SMALL
from tests.support.devices.offloading import answers, prompts
from tests.support.weights.regular import NeuronUse, write_regular
from tests.support.weights.shapes import LLAMA_1B
from tpi.devices.emulated.device import open_emulated
from tpi.devices.options import OffloadOptions
from tpi.pack.reader import Pack
from tpi.sparsity.files import NAME, load_predictors
from worker.equipment import AcceleratorSetup
from worker.neurons.accelerated import NeuronAccelerated

SHAPE: dict[str, Any] = LLAMA_1B | {
    "hidden_size": 128, "intermediate_size": 640, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return write_regular(tmp_path_factory.mktemp("regular") / "pack", SHAPE, NeuronUse(rank=32), "f32")


def machine(host: float) -> NodeMachine:
    """Return a laptop whose calls and copies begin at once, with a host that is `host` times as fast."""

    def begun(card: Accelerator) -> Accelerator:
        return replace(card, rates=replace(card.rates, start=0.0), link=replace(card.link, latency=0.0))

    rates = LAPTOP.host
    return replace(
        LAPTOP.with_cards(begun),
        host=replace(rates, start=0.0, read=host * rates.read, operations=host * rates.operations),
    )


def ran(pack: Pack, cache: Path, room: str, host: float, **more: Any) -> tuple[list[list[int]], Any]:
    options = more.pop("options", OffloadOptions())
    with closing(open_emulated(f"{room},stretch=1")) as card:
        beside = {0: AcceleratorSetup(card, machine(host), options)}
        given: dict[str, Any] = {
            "accelerators": beside,
            "predictors": load_predictors(pack.path / NAME),
            "sparsity": "auto",
        }
        with closing(in_process_deployment(pack, [1], cache, **given | SMALL | more)) as deployment:
            return answers(deployment, prompts(512, 1, seed=4, longest=12), 8), deployment.node.link


@pytest.mark.parametrize(
    ("room", "host", "active", "said"),
    [
        ("8MiB", 1.0, True, "of answer are predicted to take"),
        ("8MiB", 0.1, False, "of answer are predicted to take"),  # prompts are the host's where neurons are divided
        ("3MiB", 1.0, False, "lacks 3MiB for attention, which must fit"),
    ],
    ids=["active", "all", "no room"],
)
def test_the_plan_that_is_predicted_to_take_less(
    room: str, host: float, active: bool, said: str, pack: Pack, tmp_path: Path
) -> None:
    _, link = ran(pack, tmp_path, room, host)
    assert isinstance(link, NeuronAccelerated) == active
    assert said in link.describe()


def test_an_explicit_placement_is_the_plan(pack: Pack, tmp_path: Path) -> None:
    expected, whole = ran(pack, tmp_path / "off", "8MiB", 1.0, sparsity="off")
    found, link = ran(pack, tmp_path / "auto", "8MiB", 1.0, options=OffloadOptions(kv="ram"))
    assert found == expected
    assert not isinstance(link, NeuronAccelerated)
    assert "predicted" not in link.describe() + whole.describe()


def test_neurons_that_memory_does_not_hold_are_all_computed(
    pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.plan.case.Case.in_memory", lambda case, offload: False)
    _, link = ran(pack, tmp_path, "8MiB", 1.0)
    assert not isinstance(link, NeuronAccelerated)
    assert "memory does not hold all neurons" in link.describe()

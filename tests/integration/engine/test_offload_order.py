"""The planner's order of configurations, by speed, is the order on the emulated machine."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from master.generation.request import Request
from master.options import RunOptions
from master.planning.problem import planning_problem, request_of
from master.planning.shapes import model_shape
from master.session import Session
from master.vocabulary.sampler import Sampler, Sampling
from scheduler.model.machine import emulated_node
from scheduler.model.offload.choice import choose
from scheduler.model.offload.forecast import deepened, forecast
from tests.support.models import TinyModel
from tpi.devices.emulated.machine import parse_emulated
from tpi.devices.options import DeviceOptions, OffloadOptions

CARD = "64MiB,link=8MB/s,memory=400MB/s,flops=1T,host_memory=40MB/s,host_flops=1T,disk=3MB/s,latency=20us,launch=20us"
MANY = 1000  # tokens: no step is as long
PROMPT, STEPS, WARM, CONTEXT = 4, 4, 2, 64
TELLS = 1.6  # times faster by prediction: less is not clear


@dataclass(frozen=True)
class Configuration:
    """The settings that are forced, and the number of such cards."""

    options: OffloadOptions
    cards: int = 1


CONFIGURATIONS = {
    "all stays there": Configuration(OffloadOptions("gpu", "gpu", "performance")),
    "the host computes": Configuration(OffloadOptions("ram", "ram", "performance", MANY)),
    "over one link": Configuration(OffloadOptions("ram", "gpu", "performance", 1)),
    "over two links": Configuration(OffloadOptions("ram", "gpu", "performance", 1), cards=2),
    "from disk": Configuration(OffloadOptions("disk", "gpu", "performance", 1)),
}


def test_the_order_of_clearly_different_choices_is_as_planned(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    """Times are those of the emulated machine, so the load of the real one does not count."""
    model = str(tiny_model("llama").directory)
    said = {name: predicted(model, asked, tmp_path) for name, asked in CONFIGURATIONS.items()}
    took = {name: measured(model, asked, tmp_path) for name, asked in CONFIGURATIONS.items()}
    pairs = [sorted(pair, key=said.__getitem__) for pair in combinations(said, 2)]
    clear = [(fast, slow) for fast, slow in pairs if said[slow] > TELLS * said[fast]]
    assert len(clear) >= 6
    assert [pair for pair in clear if took[pair[0]] >= took[pair[1]]] == [], (said, took)


def predicted(model: str, asked: Configuration, cache: Path) -> float:
    """Return the seconds of a token that `tpi plan` predicts."""
    machine = emulated_node(*[parse_emulated(CARD)] * asked.cards)
    shape, options = model_shape(model, "f32", cache, 1 << 30), asked.options
    request = request_of(shape.config, PROMPT, STEPS, 1, CONTEXT)
    problem = planning_problem(shape, machine, request, options, None)
    return forecast(problem, deepened(problem, choose(problem).offload)).decode.seconds


def measured(model: str, asked: Configuration, cache: Path) -> float:
    """Return the seconds of a token on the emulated clock, the least of a few."""
    devices = DeviceOptions((f"emu:{CARD},stretch=2",) * asked.cards, (), asked.options)
    options = RunOptions(model, dtype="f32", context=CONTEXT, threads=1, devices=devices, cache=cache)
    with Session(options) as session:
        engine, emulation = session.engine, session.equipment.emulation
        assert emulation is not None
        sequence = engine.admit(list(range(5, 5 + PROMPT)))
        engine.submit(Request(sequence, Sampler(Sampling(temperature=0)), 1 + WARM + STEPS, lambda _: True))
        seconds = []
        while engine.requests:
            began = emulation.clock.now()
            engine.step()
            seconds.append(emulation.emulated_seconds(emulation.clock.now() - began))
        return min(seconds[-STEPS:])

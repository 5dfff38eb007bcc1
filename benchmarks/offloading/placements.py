"""A check that the planner's predictions put placements in the order measured on the emulated accelerator."""

from dataclasses import dataclass, replace
from itertools import combinations
from typing import get_args

from benchmarks.offloading.emulated import StepTime, emulated_node
from benchmarks.result import Check, Result, Row, Table
from benchmarks.support.models import llama_1b
from scheduler.model.offload.forecast import forecast
from scheduler.model.offload.work import Workload
from tpi.devices.options import KvPlace, OffloadOptions, Weights
from tpi.errors import PlanError

DEVICE = (
    "emu:{gpu}MiB,link=6GB/s,memory=40GB/s,flops=0.3TFLOP/s,host=0.25,disk=1GB/s,latency=20us,launch=100us,stretch=16"
)
GPU = (800, 300)  # MiB: all of the weights fit, or not half of them
PROMPT, CONTEXT, STEPS = 96, 512, 3
TELLS = 1.1  # smallest ratio of predicted times that counts as an order
RIGHT = 0.95
NOTES = f"""
Decode after a prompt of {PROMPT} tokens with a 1.1B Llama shape in 4 bits on emulated machines; milliseconds of the
emulated machine. The table has every placement of weights and of keys and values that fits, and the choice of `auto`. A
pair of placements is *told apart* if one is predicted to be {TELLS} times as fast. **Emulated figures judge schedules,
never kernels.**
"""


@dataclass(frozen=True)
class Placed:
    """One placement: the predicted time of a token, and the measured one."""

    name: str
    gpu: int
    predicted: float
    step: StepTime


def bench(quick: bool) -> Result:
    """Measure all placements on all machines."""
    found = [placed for gpu in (GPU[1:] if quick else GPU) for placed in _machine(gpu, quick)]
    pairs = [
        (one, other) if one.predicted < other.predicted else (other, one)
        for one, other in combinations(found, 2)
        if one.gpu == other.gpu
    ]
    told = [(fast, slow) for fast, slow in pairs if slow.predicted > TELLS * fast.predicted]
    right = sum(fast.step.seconds < slow.step.seconds for fast, slow in told) / max(len(told), 1)
    checks = [
        Check(f"order of {len(told)} pairs that are told apart, as measured", right, RIGHT),
        Check("auto over the best of its machine, the worst", _worst(found), TELLS, at_most=True),
    ]
    table = Table("Milliseconds per token", [_row(placed) for placed in found])
    return Result("Placements, predicted and measured", NOTES, [table], checks)


def _worst(found: list[Placed]) -> float:
    """Return how much slower `auto`'s placement is than the best one: the largest ratio of times over all machines."""
    ratios = []
    for gpu in {each.gpu for each in found}:
        mine = [each for each in found if each.gpu == gpu]
        auto = next(each for each in mine if each.name == "auto, auto")
        ratios.append(auto.step.seconds / min(each.step.seconds for each in mine))
    return max(ratios)


def _machine(gpu: int, quick: bool) -> list[Placed]:
    found = []
    for weights in get_args(Weights):
        for kv in get_args(KvPlace)[: 1 if quick else None]:
            placed = _placed(gpu, OffloadOptions(weights, kv))
            found += [placed] if placed else []
    return found


def _placed(gpu: int, options: OffloadOptions) -> Placed | None:
    """Measure one placement; return None if it does not fit."""
    try:
        with emulated_node(str(llama_1b().path), DEVICE.format(gpu=gpu), options) as node:
            node.prompt(PROMPT)
            node.tokens(1)
            step, plan = node.tokens(STEPS), node.plan
    except PlanError:
        return None
    asked = replace(plan.problem, request=Workload(PROMPT, 2 * STEPS, 1, CONTEXT))
    predicted = forecast(asked, plan.chosen).decode.seconds
    return Placed(f"{options.weights}, {options.kv}", gpu, predicted, step)


def _row(placed: Placed) -> Row:
    return {
        "GPU MiB": placed.gpu,
        "weights, KV": placed.name,
        "predicted": 1e3 * placed.predicted,
        "measured": 1e3 * placed.step.seconds,
        "ratio": placed.step.seconds / placed.predicted,
        "busiest lane": max(placed.step.use.values()),
        "overran": placed.step.overruns,
    }

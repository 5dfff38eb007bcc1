"""Keys and values divided by heads between the emulated accelerator and RAM: r_c is 0, 1, or chosen."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from benchmarks.experts.batch_node import CONTEXT, BatchNode, batch_node, dense
from benchmarks.result import Bars, Check, Result, Row, Table
from scheduler.model.roofline.latency import PolicyPoint, roofs
from scheduler.model.roofline.policy import BatchPolicy
from tpi.devices.options import KvPlace
from tpi.errors import PlanError

DEVICE = (
    "{gpu}MiB,link={link}GB/s,memory=20GB/s,flops=0.4TFLOPS,host_memory={host}GB/s,host_flops=0.1TFLOPS,disk=0.6GB/s,"
    "latency=10us,launch=20us,stretch=40,ram=1GiB"
)
REQUESTS, STEPS, ROUNDS = 96, 2, 3
FILLED = CONTEXT * 3 // 4  # tokens of each sequence: in the middle of its answer
SIDES: dict[str, KvPlace] = {"r_c = 0": "ram", "r_c = 1": "gpu", "r_c chosen": "auto"}
ZERO, ONE, CHOSEN = SIDES
REACHED = 0.85  # aim: of the predicted gain
NOTES = f"""
Decode of {REQUESTS} sequences of {FILLED} tokens with a dense shape (6 layers, hidden size 512, 8 heads, each with its
own keys and values, q4). The accelerators of the emulated machines hold the weights and a part of the keys and values.
Figures are tokens per second of the emulated machine, medians of {ROUNDS} rounds of {STEPS} steps, interleaved. With
r_c = 1 the number of sequences is limited by the accelerator's memory. `predicted` is the roofline model's rate
(equation 12), including the time to start calls. **Emulated figures judge schedules, never kernels.** `overran` counts
the tasks whose real work took more than half of their slot.
"""


@dataclass(frozen=True)
class DividedSetting:
    """A machine: GB/s of the link and of RAM, MiB of the accelerator's memory."""

    name: str
    link: float
    host: float
    gpu: int
    aim: float  # over the better of both sides

    @property
    def device(self) -> str:
        """Device in the syntax of `emu:`."""
        return DEVICE.format(gpu=self.gpu, link=self.link, host=self.host)


SETTINGS = (
    DividedSetting("RAM of 4 GB/s", 1, 4, 112, 1.2),
    DividedSetting("RAM of 3 GB/s", 1, 3, 112, 1.1),
)


@dataclass
class DividedRun:
    """One division on one machine: the policy, the predicted rate and the measured rates, in tokens per second."""

    policy: BatchPolicy
    predicted: float
    rates: list[float]
    overran: int = 0

    @property
    def rate(self) -> float:
        """Median tokens per second."""
        return median(self.rates)


def bench(quick: bool) -> Result:
    """Measure each division of keys and values on both machines."""
    found = {setting: _setting(setting, quick) for setting in (SETTINGS[:1] if quick else SETTINGS)}
    rows = [_row(setting, side, run) for setting, runs in found.items() for side, run in runs.items()]
    checks = [check for setting, runs in found.items() for check in _checks(setting, runs)]
    series = {side: [runs[side].rate for runs in found.values()] for side in SIDES}
    plot = Bars("Tokens per second by machine", "tok/s", [setting.name for setting in found], series)
    tables = [Table("Where keys and values are", rows)]
    return Result("Batches: keys and values divided by heads", NOTES, tables, checks, [plot])


def _setting(setting: DividedSetting, quick: bool) -> dict[str, DividedRun]:
    sequences = {side: _most(setting) if kv == "gpu" else REQUESTS for side, kv in SIDES.items()}
    found: dict[str, DividedRun] = {}
    for _ in range(1 if quick else ROUNDS):
        for side, kv in SIDES.items():
            with batch_node(setting.device, sequences[side], FILLED, kv=kv, model=dense) as node:
                run = found.setdefault(side, _planned(node))
                node.steps(1)
                seconds, _, overran = node.steps(STEPS)
                run.rates.append(run.policy.batch / seconds)
                run.overran += overran
    return found


def _planned(node: BatchNode) -> DividedRun:
    plan = node.link.settings
    busy = max(map(float, roofs(plan.problem, PolicyPoint.of(plan.policy), "decode").values()))
    return DividedRun(plan.policy, plan.policy.batch / (plan.problem.layer.layers * busy), [])


def _most(setting: DividedSetting) -> int:
    """Return the largest number of sequences whose keys and values all fit on the accelerator."""
    held, refused = 1, REQUESTS + 1
    while held + 1 < refused:
        middle = (held + refused) // 2
        try:
            with batch_node(setting.device, middle, FILLED, kv="gpu", model=dense):
                held = middle
        except PlanError:
            refused = middle
    return held


def _checks(setting: DividedSetting, runs: dict[str, DividedRun]) -> Iterator[Check]:
    """Check the gain over the better side, and the share of the predicted gain that was reached."""
    better = max((ZERO, ONE), key=lambda side: runs[side].rate)
    gain = runs[CHOSEN].rate / runs[better].rate
    predicted = runs[CHOSEN].predicted / runs[better].predicted
    yield Check(f"gain over {better}: {setting.name}", gain, setting.aim)
    yield Check(f"share of the predicted gain: {setting.name}", gain / predicted, REACHED)


def _row(setting: DividedSetting, side: str, run: DividedRun) -> Row:
    policy = run.policy
    return {
        "machine": setting.name,
        "keys and values": side,
        "N": policy.batch,
        "mu": policy.micro_batch,
        "A_g": int(policy.attention_there),
        "r_w": round(policy.weights_kept, 2),
        "r_c": policy.kv_kept,
        "tok/s": run.rate,
        "predicted": run.predicted,
        "of that": run.rate / run.predicted,
        "overran": run.overran,
    }

"""CGOPipe on the emulated accelerator: against the roofline model's bound, and FlexGen's schedule with both policies.

MoE-Lightning's table 5, and figure 6's schedules, over a grid of machines.
"""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.experts.batch_node import CONTEXT, batch_node
from benchmarks.experts.flexgen import flexgen_policy
from benchmarks.experts.groups import SEQUENCES, TOKENS, groups
from benchmarks.result import Bars, Check, Result, Row, Table
from scheduler.model.roofline.latency import PolicyPoint, roofs, without_partial_ffn
from scheduler.model.roofline.policy import BatchPolicy
from tests.support.devices.schedules import SCHEDULES, as_a_whole, follow
from worker.plan.case import Candidate, Case
from worker.plan.choose import Choose
from worker.plan.chunks import Chunking
from worker.plan.modes.batch import BatchSettings, problem_of, with_policy

DEVICE = (
    "{gpu}MiB,link={link}GB/s,memory=40GB/s,flops=0.4TFLOPS,host_memory={host}GB/s,host_flops=0.1TFLOPS,disk=0.6GB/s,"
    "latency=20us,launch=100us,stretch=40,ram=1GiB"
)
REQUESTS, STEPS = 192, 3
FILLED = CONTEXT * 3 // 4  # tokens of each sequence: in the middle of its answer
MIB = 1 << 20
OURS, THEIRS, THEIR_POLICY = "CGOPipe", "S4, FlexGen's", "FlexGen's, its policy"
BOUND, OF_POLICY, OF_SCHEDULE = 0.9, 3.0, 1.5  # aims
PAPER = "link 1"  # the machine of table 5's checks: the link is the bottleneck, as in the paper
NOTES = f"""
Decode of up to {REQUESTS} sequences of {FILLED} tokens with a small Mixtral's shape (6 layers of 8 experts, hidden size
512, q4) on emulated machines. Their links are slower in the proportion in which the layers are smaller. Figures are
tokens per second of the emulated machine. `bound` is the roofline model's rate for the policy (equation 12). A step
does not include the head. S2 and S3 are the schedules of figure 6 with TPI's policy. S4 computes attention on the
accelerator, once with TPI's policy and once with the policy of FlexGen's published linear program (all keys and values
on one side). FlexGen also waits for all work after each micro-batch; this S4 does not. If the roofline model's policy
has A_g = 1, then S4 is the schedule that runs. **Emulated figures judge schedules, never kernels.** `overran` counts
the tasks, in all runs of a row, whose real work took more than half of their slot. One and two nodes have
{SEQUENCES} sequences, an eighth of the hidden size as in the paper, and calls that start as quickly as on real cards.
Sums between nodes take no emulated time. Prompts have {TOKENS} tokens each, and all weights are in RAM.
"""


@dataclass(frozen=True)
class Setting:
    """A machine: GB/s of the link and of RAM, MiB of the accelerator's memory and of RAM (0: all of it)."""

    name: str
    link: float
    host: float
    gpu: int
    memory: int = 0

    @property
    def device(self) -> str:
        """Device in the syntax of `emu:`."""
        return DEVICE.format(gpu=self.gpu, link=self.link, host=self.host)


SETTINGS = (
    Setting("link 1/2", 0.5, 6, 32),
    Setting(PAPER, 1, 6, 32),
    Setting("link 2, small GPU", 2, 6, 24),
    Setting("link 1, slow RAM", 1, 1, 32),
    Setting("link 4, slow RAM", 4, 1, 40),
    Setting("link 1, disk", 1, 6, 32, 140),
)


@dataclass(frozen=True)
class BatchRun:
    """One schedule on one machine: tokens per second, the bound, the busiest lane's share, tasks that overran."""

    policy: BatchPolicy
    rate: float
    bound: float
    busiest: str
    overran: int


def bench(quick: bool) -> Result:
    """Measure every schedule on a grid of emulated machines."""
    found = {setting: _setting(setting, quick) for setting in (SETTINGS[1:2] if quick else SETTINGS)}
    ours = {setting: runs[OURS] for setting, runs in found.items()}
    paper = next(runs for setting, runs in found.items() if setting.name == PAPER)
    checks = [
        Check("tokens per second over the bound, the least of the grid", min(map(_reached, ours.values())), BOUND),
        Check(f"gain over FlexGen's schedule with its policy, {PAPER}", _gain(paper, THEIR_POLICY), OF_POLICY),
        Check(f"gain over FlexGen's schedule with our policy, {PAPER}", _gain(paper, THEIRS), OF_SCHEDULE),
    ]
    names = [OURS, *SCHEDULES, THEIR_POLICY]
    series = {name: [runs[name].rate if name in runs else 0.0 for runs in found.values()] for name in names}
    grouped, gained = groups(quick)
    plot = Bars("Tokens per second by machine", "tok/s", [setting.name for setting in found], series)
    tables = [
        Table("Policies and the bound", [_policy_row(setting, run) for setting, run in ours.items()]),
        Table("Tokens per second by schedule", [_rate_row(setting, runs) for setting, runs in found.items()]),
        *grouped,
    ]
    return Result("Batches: CGOPipe on the emulated accelerator", NOTES, tables, [*checks, *gained], [plot])


def _setting(setting: Setting, quick: bool) -> dict[str, BatchRun]:
    steps = 1 if quick else STEPS
    found = {OURS: _run(setting, steps)}
    for name in SCHEDULES:
        found[name] = _run(setting, steps, name, as_a_whole)
    found[THEIR_POLICY] = _run(setting, steps, THEIRS, _with_policy(flexgen_policy))
    return found


def _run(setting: Setting, steps: int, schedule: str = "", decide: Choose | None = None) -> BatchRun:
    with batch_node(setting.device, REQUESTS, FILLED, decide, setting.memory * MIB) as node:
        if schedule:
            follow(node.link, schedule)
        node.steps(1)
        seconds, use, overran = node.steps(steps)
        plan = node.link.settings
        bound = plan.problem.layer.layers * max(_roofs(plan).values())
        busiest = max(use, key=lambda lane: use[lane])
        batch = plan.policy.batch
        return BatchRun(plan.policy, batch / seconds, batch / bound, f"{busiest} {use[busiest]:.2f}", overran)


def _roofs(plan: BatchSettings) -> dict[str, float]:
    busy = roofs(plan.problem, PolicyPoint.of(plan.policy), "decode")
    return {name: float(value) for name, value in busy.items()}


def _with_policy(policy: Callable[..., BatchPolicy]) -> Choose:
    """Return a planner that takes the policy from `policy` and loads each layer's weights as a whole."""

    def decide(case: Case) -> Candidate[BatchSettings]:
        asked = problem_of(case)
        return with_policy(case, asked, without_partial_ffn(asked, policy(asked)), Chunking(1))

    return decide


def _reached(run: BatchRun) -> float:
    return run.rate / run.bound


def _gain(runs: dict[str, BatchRun], over: str) -> float:
    return runs[OURS].rate / runs[over].rate


def _policy_row(setting: Setting, run: BatchRun) -> Row:
    policy = run.policy
    return {
        "machine": setting.name,
        "N": policy.batch,
        "mu": policy.micro_batch,
        "A_g": int(policy.attention_there),
        "r_w": round(policy.weights_kept, 2),
        "r_c": policy.kv_kept,
        "on disk": round(policy.weights_on_disk, 2),
        "tok/s": run.rate,
        "bound": run.bound,
        "of the bound": _reached(run),
        "busiest lane": run.busiest,
    }


def _rate_row(setting: Setting, runs: dict[str, BatchRun]) -> Row:
    theirs = runs[THEIR_POLICY].policy
    row: dict[str, str | int | float] = {"machine": setting.name}
    row |= {name: run.rate for name, run in runs.items()}
    return {
        **row,
        "its N, mu": f"{theirs.batch}, {theirs.micro_batch}",
        "gain, its policy": _gain(runs, THEIR_POLICY),
        "gain, ours": _gain(runs, THEIRS),
        "overran": sum(run.overran for run in runs.values()),
    }

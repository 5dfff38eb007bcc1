"""The report of a batch's policy, in words and as JSON: what `tpi plan --batch N` adds (docs/batching.md)."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from master.deployment.batching import with_longest_steps
from scheduler.model.offload.forecast import Gain
from scheduler.model.offload.work import REQUEST_PHASES, RequestPhase
from scheduler.model.roofline.forecast import BatchForecast, batch_gains, forecast_batch
from scheduler.model.roofline.latency import PolicyPoint, accelerator_bytes, host_bytes
from scheduler.model.roofline.levels import Hierarchy, TurningPoints
from scheduler.model.roofline.policy import BatchPolicy, BatchProblem, PolicyLimits
from scheduler.model.roofline.search import BatchChoice, best_policy
from tpi.kernels.kv import pages_for
from tpi.net.fields import UsualRequest
from tpi.text import short_number
from worker.pipelines.agree import GroupMember, group_problems
from worker.plan.case import Case

RESOURCES = {
    "accelerator": "the GPU", "host": "the CPU", "up": "the link to the GPU", "down": "the link from the GPU",
    "disk": "the disk", "bus": "RAM's bus", "turns": "CPU and GPU in turns", "sums": "the network",
}  # fmt: skip
_PHASES: dict[RequestPhase, str] = {"prompt": "prompts", "decode": "tokens"}
# smallest reported speed-up, number of reported speed-ups, and smallest reported part of a layer's time
_HELPS, _NAMED, _SHOWN = 1.01, 4, 0.005
_MS = 1e3


@dataclass(frozen=True)
class BatchReport:
    """The planning problem of a batch, the policy chosen for it, and its forecast."""

    problem: BatchProblem
    choice: BatchChoice
    forecast: BatchForecast
    gains: tuple[Gain, ...]

    @classmethod
    def of(cls, case: Case, requests: int) -> "BatchReport":
        """Return the report on the best policy for `requests` requests of `case` at once.

        Raises:
            PlanError: if nothing fits.
        """
        return cls.on(batch_problem(case, requests))

    @classmethod
    def on(cls, problem: BatchProblem) -> "BatchReport":
        """Return the report on a problem of the roofline model.

        Raises:
            PlanError: if nothing fits.
        """
        choice = best_policy(problem)
        ahead = forecast_batch(problem, choice.policy)
        return cls(problem, choice, ahead, tuple(batch_gains(problem, ahead.rate)))

    @property
    def points(self) -> TurningPoints | None:
        """The turning points P1 and P2 (`TurningPoints`) for FFN blocks in RAM; None without an accelerator.

        They say at which intensities it pays to compute such blocks on the accelerator.
        """
        hierarchy, layer = Hierarchy.of(self.problem.machine), self.problem.layer
        if self.problem.machine.accelerator is None:
            return None
        tokens = self.forecast.policy.micro_batch
        return hierarchy.turning_points(0, 2.0 * tokens * layer.token_weights / float(layer.touched(tokens)), 1)

    def fields(self) -> dict[str, Any]:
        """Return the object for `--json`: sizes in bytes, times in seconds."""
        at, points = PolicyPoint.of(self.forecast.policy), self.points
        return {
            "policy": asdict(self.forecast.policy) | {"micro_batch": self.forecast.policy.micro_batch},
            "tokens_per_s": self.forecast.rate,
            "prompt_s": self.forecast.prompt,
            "token_s": self.forecast.decode,
            "layer_busy_s": self.forecast.busy,
            "roof": {phase: self.forecast.roof(phase) for phase in REQUEST_PHASES},
            "turning_points": asdict(points) if points else None,
            "memory": {
                "ram": float(host_bytes(self.problem, at)),
                "gpu": float(accelerator_bytes(self.problem, at)),
            },
            "gains": [asdict(gain) for gain in self.gains],
            "prompt_step_tokens": self.problem.together[1],
            "compared": self.choice.compared,
        }

    def lines(self) -> Iterator[str]:
        """Yield the sentences of the report, for the user."""
        ahead, request = self.forecast, self.problem.request
        yield f"batches of {request.most} requests: {policy_words(ahead.policy)}"
        yield (
            f"{short_number(ahead.rate)} tok/s in all, prompts included: {ahead.policy.batch} prompts in "
            f"{short_number(ahead.prompt)} s, then {short_number(ahead.decode)} s for a token of each"
        )
        for phase in REQUEST_PHASES:
            roof = RESOURCES[ahead.roof(phase)]
            yield f"the roof for {_PHASES[phase]} is {roof}; busy times of a layer: {busy_words(ahead, phase)}"
        yield from self._turning()
        helping = [gain for gain in self.gains if gain.faster > _HELPS]
        told = ", ".join(f"{gain.times:g}x {gain.thing} {gain.faster:.2f}x as fast" for gain in helping[:_NAMED])
        yield (
            f"what would help a batch most: {told}" if told else "twice as much of any one thing would not help a batch"
        )

    def _turning(self) -> Iterator[str]:
        points, layer = self.points, self.problem.layer
        if points is None:
            return
        each = 2.0 * layer.token_weights / layer.feed_forward_bytes
        yield (
            f"moving neurons from RAM to the GPU is faster from {short_number(points.move / each)} tokens on; from "
            f"{short_number(points.arrive / each)} tokens on, the link is not a limit"
        )


def batch_problem(case: Case, requests: int) -> BatchProblem:
    """Return the roofline model's problem for `requests` requests at once, as a node solves it.

    Unless the pipeline is `batch`, the solution may also be that the CPU computes the neurons. A run would then make no
    micro-batches.
    """
    assert case.machine is not None  # the roofline model compares its speeds
    usual = UsualRequest(case.request.prompt, case.request.answer) if case.request else case.plan.options.request
    options = replace(case.plan.options, usual=usual, pages=requests * pages_for(usual.tokens))
    member = GroupMember("", replace(case.plan, options=options), case.machine, case.options, case.tables)
    _, (found,) = group_problems(with_longest_steps([member], many=True))
    limits = found.limits if case.accelerated else PolicyLimits(kv_heads=max(1, case.plan.kv_heads))
    if case.options.pipeline != "batch":
        limits = replace(limits, ffn_there=None)
    return replace(found, pool=0, limits=limits)


def policy_words(policy: BatchPolicy, sizes: bool = True) -> str:
    """Return the policy in words: what the GPU computes, and which parts of weights, keys and values stay on it.

    With `sizes`, first say how many sequences are computed at once, in how many micro-batches.
    """
    parts = [f"{policy.batch} at once (N), {policy.micro_batches} micro-batches of {policy.micro_batch} (mu)"] * sizes
    places = {True: "GPU", False: "CPU"}
    attends = "attention" if not policy.divided else "attention with keys and values in RAM"
    parts.append(f"{attends} on the {places[policy.attention_there]}, neurons on the {places[policy.ffn_there]}")
    if policy.attention_there or policy.ffn_there:
        parts.append(f"{policy.weights_kept:.0%} of the weights stay on the GPU (r_w)")
    if policy.divided:
        parts.append(f"and so do {policy.kv_kept:.0%} of the keys and values (r_c), with which the GPU attends")
    elif policy.attention_there:
        parts.append(f"and {policy.kv_kept:.0%} of the keys and values (r_c)")
    if policy.weights_on_disk > _SHOWN:
        parts.append(f"{policy.weights_on_disk:.0%} of the weights come from disk")
    return ", ".join(parts)


def busy_words(ahead: BatchForecast, phase: RequestPhase) -> str:
    """Return a text with each resource's milliseconds for a layer in `phase`, the busiest first."""
    busy = sorted(ahead.busy[phase].items(), key=lambda item: -item[1])
    longest = busy[0][1]
    told = [f"{RESOURCES[name]} {short_number(_MS * value)} ms" for name, value in busy if value > _SHOWN * longest]
    return ", ".join(told)

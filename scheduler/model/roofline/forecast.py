"""The forecast of a batch's policy: its speed, the roof that limits it, and the gain from better hardware."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scheduler.model.offload.forecast import Gain, better_machines
from scheduler.model.offload.work import REQUEST_PHASES, RequestPhase
from scheduler.model.roofline.latency import PolicyPoint, roofs, step_seconds, throughput
from scheduler.model.roofline.policy import BatchPolicy, BatchProblem
from scheduler.model.roofline.search import best_policy

_TIMES = 2.0  # gains are forecast for this many times as much of one part of the hardware


@dataclass(frozen=True)
class BatchForecast:
    """The forecast of one policy.

    Attributes:
        policy: the policy.
        rate: tokens generated per second, prompts included.
        prompt: seconds of all prompts.
        decode: seconds of one token of every sequence.
        busy: for either phase, the seconds that a layer keeps each resource busy, by resource.
    """

    policy: BatchPolicy
    rate: float
    prompt: float
    decode: float
    busy: dict[RequestPhase, dict[str, float]]

    def roof(self, phase: RequestPhase) -> str:
        """Return the resource that limits a phase."""
        busy = self.busy[phase]
        return max(busy, key=lambda name: busy[name])


def forecast_batch(problem: BatchProblem, policy: BatchPolicy) -> BatchForecast:
    """Return the forecast of `policy`, which must fit into the memories of the node."""
    at = PolicyPoint.of(policy)
    busy: dict[RequestPhase, dict[str, float]] = {
        phase: {name: float(value) for name, value in roofs(problem, at, phase).items()} for phase in REQUEST_PHASES
    }
    prompt, decode = (step_seconds(problem, policy, phase) for phase in REQUEST_PHASES)
    return BatchForecast(policy, throughput(problem, policy), prompt, decode, busy)


def batch_gains(problem: BatchProblem, rate: float) -> list[Gain]:
    """Return the gain from twice as much of each part of the hardware; the largest gain first.

    Each gain compares the best policy for the better hardware with `rate`, in tokens per second.
    """
    return sorted(_gains(problem, rate), key=lambda gain: -gain.faster)


def _gains(problem: BatchProblem, rate: float) -> Iterator[Gain]:
    changed = [(thing, replace(problem, machine=machine)) for thing, machine in better_machines(problem.machine)]
    more = replace(problem.request, most=round(_TIMES * problem.request.most))
    for thing, better in [*changed, ("requests", replace(problem, request=more))]:
        yield Gain(thing, _TIMES, max(1.0, throughput(better, best_policy(better).policy) / rate))

"""The forecast of a configuration: speed, use of each lane, the bottleneck, and the gain from better hardware."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scheduler.model.machine import DeviceLink, NodeMachine, Rates
from scheduler.model.offload.choice import OffloadChoice, choose
from scheduler.model.offload.memory import peaks
from scheduler.model.offload.problem import Problem
from scheduler.model.offload.tasks import Candidates
from scheduler.model.offload.timeline import simulate_steps
from scheduler.model.offload.work import Offload, RequestPhase, StepSize

_STEPS = 4  # decode steps simulated; the last one counts
_DEEPER = (4, 3)  # numbers of slots that are tried
_TIMES = 2.0  # gains are forecast for this many times as much of one part of the hardware


@dataclass(frozen=True)
class PhaseForecast:
    """The forecast of one kind of step: `tokens` in `seconds`, and the share of the time that each lane is busy.

    A lane is a device or one direction of its link.
    """

    tokens: float
    seconds: float
    use: dict[str, float]

    @property
    def rate(self) -> float:
        """Tokens per second, of all sequences together."""
        return self.tokens / self.seconds

    @property
    def bottleneck(self) -> str:
        """The device or link that is busy for the largest share of the time."""
        return max(self.use, key=lambda lane: self.use[lane])


@dataclass(frozen=True)
class OffloadForecast:
    """The forecast of a request; `ttft` is the seconds to the first token of all sequences."""

    ttft: float
    prompt: PhaseForecast
    decode: PhaseForecast


def deepened(problem: Problem, offload: Offload) -> Offload:
    """Return the configuration with as many slots for streamed segments as the accelerator's free memory allows.

    With more slots, computing waits less for segments that take long to load.
    """
    if problem.machine.accelerator is None or offload.pipeline == "memory":
        return offload
    deeper = (replace(offload, slots=slots) for slots in _DEEPER)
    return next((each for each in deeper if _fits(problem, each)), offload)


def _fits(problem: Problem, offload: Offload) -> bool:
    found = peaks(problem.work, offload, problem.request, problem.needs, problem.chunk).cards
    return all(parts.total <= card.memory for parts, card in zip(found, problem.machine.cards, strict=False))


def forecast(problem: Problem, offload: Offload) -> OffloadForecast:
    """Return the forecast of a configuration that fits: of its mean prompt step, and of its decode step in the long
    run.
    """
    count = problem.step("prompt")[1]
    prompt = _phase(problem, offload, "prompt", min(count, 2), long_run=False)
    return OffloadForecast(count * prompt.seconds, prompt, decode_forecast(problem, offload))


def decode_forecast(problem: Problem, offload: Offload) -> PhaseForecast:
    """Return the forecast of a decode step in the long run, for a configuration that fits."""
    return _phase(problem, offload, "decode", _STEPS, long_run=True)


def step_seconds(problem: Problem, offload: Offload, step: StepSize) -> float:
    """Return the long-run seconds of a step of the size `step`, computed as `offload` computes decode steps."""
    tasks = problem.tasks(step, offload.cards)
    places = Candidates.of(problem.work, [offload], "decode")
    times = simulate_steps(tasks, places, problem.work.blocks, offload.pipeline, _STEPS, offload.slots)
    return float(times.steps[-1, 0])


def _phase(problem: Problem, offload: Offload, phase: RequestPhase, steps: int, long_run: bool) -> PhaseForecast:
    size, _ = problem.step(phase)
    tasks = problem.tasks(size, offload.cards)
    times = simulate_steps(
        tasks,
        Candidates.of(problem.work, [offload], phase),
        problem.work.blocks,
        offload.pipeline,
        steps,
        offload.slots,
    )
    seconds = float(times.steps[-1, 0] if long_run else times.steps[:, 0].mean())
    return PhaseForecast(
        size.tokens, seconds, {lane: min(1.0, float(busy[0]) / seconds) for lane, busy in times.busy.items()}
    )


@dataclass(frozen=True)
class Gain:
    """The benefit of better hardware: with `times` as much of `thing`, the request is `faster` times as fast."""

    thing: str
    times: float
    faster: float


def gains(problem: Problem, found: OffloadChoice) -> list[Gain]:
    """Return the gain from twice as much of each part of the hardware; the largest gain first.

    For each better machine, the request is planned anew with the pipeline of `found`.
    """
    limits, cards = replace(problem.limits, pipeline=found.offload.pipeline), found.offload.cards
    machines = better_machines(problem.machine)
    better = [(thing, replace(problem, machine=machine, limits=limits, cards=cards)) for thing, machine in machines]
    told = [Gain(thing, _TIMES, max(1.0, found.seconds / choose(each).seconds)) for thing, each in better]
    return sorted(told, key=lambda gain: -gain.faster)


def better_machines(machine: NodeMachine) -> Iterator[tuple[str, NodeMachine]]:
    """Yield the name of each part of the hardware, for reports, and the machine with `_TIMES` as much of it."""
    host = machine.host
    yield "RAM", replace(machine, memory=round(machine.memory * _TIMES))
    yield "disk speed", replace(machine, disk=replace(machine.disk, read=machine.disk.read * _TIMES))
    yield "RAM speed", replace(machine, host=_faster(host, _TIMES, 1), bus=machine.bus * _TIMES)
    yield "CPU speed", replace(machine, host=_faster(host, 1, _TIMES))
    if machine.cards:
        yield "GPU memory", machine.with_cards(lambda card: replace(card, memory=round(card.memory * _TIMES)))
        yield "link speed", machine.with_cards(lambda card: replace(card, link=_wider(card.link)))
        yield "GPU speed", machine.with_cards(lambda card: replace(card, rates=_faster(card.rates, _TIMES, _TIMES)))


def _wider(link: DeviceLink) -> DeviceLink:
    return replace(link, up=link.up * _TIMES, down=link.down * _TIMES)


def _faster(rates: Rates, reading: float, computing: float) -> Rates:
    kv = rates.kv.scaled(computing) if rates.kv else None
    return replace(rates, read=rates.read * reading, operations=rates.operations * computing, kv=kv)

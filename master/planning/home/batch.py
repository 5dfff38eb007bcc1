"""The policy of a batch over the machines of a home: what `tpi plan --batch N` adds for several (docs/batching.md)."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from math import ceil
from typing import Any

from master.planning.batch import RESOURCES, busy_words, policy_words
from master.planning.home.dealing import HomeModel
from master.planning.problem import default_kv
from scheduler.model.home.problem import HomeSplit
from scheduler.model.machine import NodeMachine
from scheduler.model.offload.forecast import Gain, better_machines
from scheduler.model.offload.work import REQUEST_PHASES, RequestPhase, TableWork, Tier
from scheduler.model.roofline.forecast import BatchForecast, forecast_batch
from scheduler.model.roofline.layer import LayerShape, layer_shape
from scheduler.model.roofline.policy import BatchProblem, BatchWork, PolicyLimits, SumCost
from scheduler.model.roofline.search import best_policies
from tpi.config import RECURRENT
from tpi.text import short_number

_TIMES = 2.0  # factor by which a resource is improved to find its gain
_HELPS, _NAMED = 1.01, 4  # smallest reported speed-up, and number of reported speed-ups
_MANY = 512  # tokens of the larger of two sums from which the time per token is derived
_PROMPTS = 0.05  # part of the memory for the hidden states of a step of prompts
_PHASES: dict[RequestPhase, str] = {"prompt": "prompts", "decode": "tokens"}
_HIDDEN = 5 * 4  # bytes of RAM for each value of a hidden state that waits


@dataclass(frozen=True)
class GroupBatchReport:
    """The plan of a batch over several nodes: all have the same size of micro-batch, each its own policy."""

    names: tuple[str, ...]
    problems: tuple[BatchProblem, ...]
    forecasts: tuple[BatchForecast, ...]
    gains: tuple[Gain, ...]
    left_out: tuple[str, ...] = ()  # names of nodes that the split, made for single requests, leaves out

    @classmethod
    def of(cls, model: HomeModel, dealing: HomeSplit) -> "GroupBatchReport":
        """Return the report for the requests of `model`, with the units dealt as in `dealing`.

        Raises:
            PlanError: if a node cannot hold even one request.
        """
        problems = tuple(_problems(model, dealing))
        forecasts = _forecasts(problems)
        names = tuple(model.home.names[rank] for rank in dealing.members)
        left_out = tuple(name for name in model.home.names if name not in names)
        return cls(names, problems, forecasts, tuple(_gains(problems, _rate(problems, forecasts))), left_out)

    @property
    def rate(self) -> float:
        """Tokens generated per second; the time of the prompts counts too, and all nodes wait for the slowest."""
        return _rate(self.problems, self.forecasts)

    def seconds(self, phase: RequestPhase) -> float:
        """Return the seconds of `phase`: of all prompts, or of one token of every sequence."""
        return _seconds(self.forecasts, phase)

    def fields(self) -> dict[str, Any]:
        """Return the object for `--json`: times in seconds."""
        first = self.forecasts[0].policy
        return {
            "batch": first.batch,
            "micro_batches": first.micro_batches,
            "micro_batch": first.micro_batch,
            "tokens_per_s": self.rate,
            "prompt_s": self.seconds("prompt"),
            "token_s": self.seconds("decode"),
            "nodes": [
                {"name": name, "policy": asdict(ahead.policy), "layer_busy_s": ahead.busy}
                for name, ahead in zip(self.names, self.forecasts, strict=True)
            ],
            "left_out": list(self.left_out),
            "gains": [asdict(gain) for gain in self.gains],
        }

    def lines(self) -> Iterator[str]:
        """Yield the sentences of the report, for the user."""
        first, most = self.forecasts[0].policy, self.problems[0].request.most
        yield (
            f"batches of {most} requests: {first.batch} at once (N), {first.micro_batches} micro-batches of "
            f"{first.micro_batch} (mu), the same on all nodes"
        )
        yield (
            f"{short_number(self.rate)} tok/s in all, prompts included: {first.batch} prompts in "
            f"{short_number(self.seconds('prompt'))} s, "
            f"then {short_number(self.seconds('decode'))} s for a token of each"
        )
        told = zip(self.forecasts, self.names, strict=True)
        for places, alike in groupby(told, lambda one: policy_words(one[0].policy, sizes=False)):
            yield f"{_named([name for _, name in alike])}: {places}"
        if self.left_out:
            out = ", ".join(self.left_out)
            yield f"left out, because single requests are faster without them: {out}; --split equal uses all of them"
        for phase in REQUEST_PHASES:
            yield self._roof(phase)
        helping = [gain for gain in self.gains if gain.faster > _HELPS][:_NAMED]
        helps = ", ".join(f"{gain.times:g}x {gain.thing} {gain.faster:.2f}x as fast" for gain in helping)
        yield (
            f"what would help a batch most: {helps}"
            if helps
            else "twice as much of any one thing would not help a batch"
        )

    def _roof(self, phase: RequestPhase) -> str:
        slowest = max(range(len(self.names)), key=lambda at: max(self.forecasts[at].busy[phase].values()))
        ahead = self.forecasts[slowest]
        roof = ahead.roof(phase)
        whose = "" if roof == "sums" else f", on {self.names[slowest]}"
        busy = busy_words(ahead, phase)
        return f"the roof for {_PHASES[phase]} is {RESOURCES[roof]}{whose}; busy times of a layer: {busy}"


def _problems(model: HomeModel, dealing: HomeSplit) -> Iterator[BatchProblem]:
    whole, request = model.whole, model.request
    asked = BatchWork(request.sequences, request.prompt, request.answer)
    hidden = _HIDDEN * model.shape.config.hidden
    sums = _sums(model, dealing)
    for position, rank in enumerate(dealing.members):
        machine = model.home.batching[rank]
        units = {kind: counts[position] for kind, counts in dealing.units.items()}
        step = int(machine.memory * _PROMPTS / hidden)
        head = TableWork() if rank else whole.work.head
        layer = _layer(model, units)
        weights: Tier | None = None if machine.accelerator or not model.home.cards else "ram"
        limits = PolicyLimits(weights=weights, kv_heads=max(1, _kv_heads(model, units)))
        yield BatchProblem(
            layer, machine, asked, whole.needs, whole.chunk, step, head, limits, passing=hidden, sums=sums
        )


def _layer(model: HomeModel, units: dict[str, int]) -> LayerShape:
    shares, config = _shares(model, units), model.shape.config
    kinds = dict.fromkeys(RECURRENT, "heads") | {"attention": "heads", "ffn": "neurons", "experts": "experts"}
    runs = [
        (block.kind, run, round(run.units * shares.get("shared" if run.name == "shared" else kinds[block.kind], 1.0)))
        for block in model.shape.blocks
        for run in block.runs
    ]
    kv_dtype = model.kv_dtype or default_kv(model.shape)
    heads = round(config.heads * shares.get("heads", 1.0))
    return layer_shape(config, runs, heads, _kv_heads(model, units), kv_dtype)


def _shares(model: HomeModel, units: dict[str, int]) -> dict[str, float]:
    return {each.kind: units[each.kind] / each.units for each in model.problem.kinds}


def _kv_heads(model: HomeModel, units: dict[str, int]) -> int:
    return ceil(model.shape.config.kv_heads * _shares(model, units).get("heads", 1.0))


def _sums(model: HomeModel, dealing: HomeSplit) -> SumCost:
    """Return the cost of a sum between the members, as a line through its times for one token and for many."""
    one, many = (model.exchange(dealing.members, tokens)[0] for tokens in (1, _MANY))
    each = max(0.0, many - one) / (_MANY - 1)
    return SumCost(max(0.0, one - each), each)


def _forecasts(problems: Sequence[BatchProblem]) -> tuple[BatchForecast, ...]:
    policies = best_policies(problems).policies
    return tuple(forecast_batch(problem, policy) for problem, policy in zip(problems, policies, strict=True))


def _seconds(forecasts: Sequence[BatchForecast], phase: RequestPhase) -> float:
    return max(ahead.prompt if phase == "prompt" else ahead.decode for ahead in forecasts)


def _rate(problems: Sequence[BatchProblem], forecasts: Sequence[BatchForecast]) -> float:
    answer, batch = problems[0].request.answer, forecasts[0].policy.batch
    return batch * answer / (_seconds(forecasts, "prompt") + (answer - 1) * _seconds(forecasts, "decode"))


def _gains(problems: Sequence[BatchProblem], rate: float) -> list[Gain]:
    """Return the speed-ups from twice as much of each resource on every node, and from sums in half the time.

    The largest speed-up comes first.
    """
    things = [thing for thing, _ in better_machines(problems[0].machine)]
    better = {thing: [_with(problem, thing) for problem in problems] for thing in things}
    sums = problems[0].sums
    half = SumCost(sums.start / _TIMES, sums.token / _TIMES)
    better["the network"] = [replace(problem, sums=half) for problem in problems]
    found = [Gain(thing, _TIMES, max(1.0, _rate(each, _forecasts(each)) / rate)) for thing, each in better.items()]
    return sorted(found, key=lambda gain: -gain.faster)


def _with(problem: BatchProblem, thing: str) -> BatchProblem:
    machines: dict[str, NodeMachine] = dict(better_machines(problem.machine))
    return replace(problem, machine=machines.get(thing, problem.machine))


def _named(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _NAMED else f"{names[0]} to {names[-1]}"

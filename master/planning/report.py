"""The report of `tpi plan` on one node, as figures: made once, for the table and for `--json`."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from master.planning.experts import ExpertsReport
from master.planning.node import PlannedNode
from master.planning.reasons import reasons
from master.planning.shapes import ModelShape, weight_bytes
from scheduler.model.offload.choice import OffloadChoice
from scheduler.model.offload.crossover import crossover
from scheduler.model.offload.forecast import Gain, OffloadForecast, PhaseForecast, deepened, forecast, gains
from scheduler.model.offload.memory import Peaks, peaks
from scheduler.model.offload.problem import Problem
from scheduler.model.offload.work import PLACES, REQUEST_PHASES, TIERS, Tier, kv_pages
from worker.plan.case import Candidate, Case
from worker.plan.choose import choose, ranked
from worker.plan.modes.experts import CardSlots

KINDS = ("attention", "ffn")
_PERCENT = 100.0


@dataclass(frozen=True)
class PlanReport:
    """A node's problem, the plan that was chosen for it, and the forecast."""

    shape: ModelShape
    node: PlannedNode
    problem: Problem
    chosen: OffloadChoice
    forecast: OffloadForecast
    peaks: Peaks
    # by tier: number of tokens from which moving an FFN segment to the accelerator is faster
    crossovers: Mapping[str, int | None]
    gains: tuple[Gain, ...]
    experts: ExpertsReport | None = None  # experts that come to the accelerator on demand

    @classmethod
    def of(cls, shape: ModelShape, node: PlannedNode, case: Case) -> "PlanReport":
        """Report on the plan that a node would choose.

        Raises:
            PlanError: if nothing fits.
        """
        best, *others = ranked(case)
        if best.mode != "experts":
            return cls._fixed(shape, node, case, best.details)
        still = next((each for each in others if each.mode == "offload"), None) or _without_demand(case)
        report = cls._fixed(shape, node, case, still.details)
        return report._with(ExpertsReport(case.plan, best.details, sum(still.seconds)), best)

    def _with(self, experts: ExpertsReport, best: Candidate[CardSlots]) -> "PlanReport":
        """Return the report on a plan in which experts are loaded on demand."""
        found, steps = experts.forecast, self.forecast
        assert best.offload is not None
        decode = replace(steps.decode, seconds=found.token_seconds, use=found.use)
        return replace(
            self,
            problem=best.offload.problem,
            chosen=replace(
                self.chosen,
                offload=found.offload,
                prompt_seconds=found.prompt_seconds,
                decode_seconds=found.tokens * found.token_seconds,
            ),
            forecast=OffloadForecast(found.prompt_seconds, found.prompt, decode),
            peaks=found.peaks,
            gains=(),
            experts=experts,
        )

    @classmethod
    def _fixed(cls, shape: ModelShape, node: PlannedNode, case: Case, chosen: OffloadChoice) -> "PlanReport":
        """Return the report on the plan `chosen`, in which weights move in a fixed cycle or not at all."""
        problem = case.problem(case.pieces, case.rounding_bytes(case.pieces))
        offload = deepened(problem, chosen.offload)
        cards, work = problem.machine.cards, problem.work
        largest = max((each for each in work.segments if each.kind == "ffn"), key=lambda each: each.nbytes)
        outside: tuple[Tier, ...] = TIERS[1:] if cards else ()
        return cls(
            shape=shape,
            node=node,
            problem=problem,
            chosen=chosen,
            forecast=forecast(problem, offload),
            peaks=peaks(work, offload, problem.request, problem.needs, problem.chunk),
            crossovers={
                str(tier): crossover(largest, problem.machine, tier, offload.pipeline, work.crossing)
                for tier in outside
            },
            gains=tuple(gains(problem, chosen)),
        )

    def lying(self, kind: str) -> dict[str, tuple[int, int]]:
        """Return the number of segments of `kind` in each memory tier, and their bytes."""
        found = dict.fromkeys(map(str, TIERS), (0, 0))
        for segment, tier in zip(self.problem.work.segments, self.chosen.offload.residence, strict=True):
            if segment.kind == kind:
                count, nbytes = found[tier]
                found[tier] = (count + 1, nbytes + segment.nbytes)
        return found

    def computed(self, kind: str) -> dict[str, dict[str, int]]:
        """Return, for prompts and for decoding, the number of segments of `kind` that each device computes."""
        told: dict[str, dict[str, int]] = {}
        for phase in REQUEST_PHASES:
            places = zip(self.problem.work.segments, self.chosen.offload.places(phase), strict=True)
            counts = Counter(place for segment, place in places if segment.kind == kind)
            told[phase] = {place: counts[place] for place in PLACES}
        return told

    def fields(self) -> dict[str, Any]:
        """Return the object for `--json`: the cluster's figures, then each node's. Times in seconds, sizes in bytes."""
        ahead, request = self.forecast, self.problem.request
        return {
            "model": {
                "name": self.shape.name,
                "dtype": self.shape.dtype,
                "layers": self.shape.config.layers,
                "weight_bytes": weight_bytes(self.shape),
                "kv_bytes": kv_pages(self.problem.work, request),
            },
            "request": asdict(request),
            "ttft_s": ahead.ttft,
            "prefill_tokens_per_s": ahead.prompt.rate,
            "decode_tokens_per_s": ahead.decode.rate,
            "nodes": [self._node()],
        }

    def _node(self) -> dict[str, Any]:
        offload = self.chosen.offload
        return {
            "machine": asdict(self.node.machine) | {"bus": _finite(self.node.machine.bus)},
            "measured": self.node.origin,
            "pipeline": offload.pipeline,
            "cards": list(offload.cards),
            "kv": offload.kv,
            "head": offload.head if self.problem.work.head.nbytes else None,
            "segments": {kind: self._segments(kind) for kind in KINDS},
            "prefill_chunk_tokens": self.problem.chunk,
            "crossover_tokens": dict(self.crossovers),
            "use_percent": {"prompt": _percent(self.forecast.prompt), "decode": _percent(self.forecast.decode)},
            "bottleneck": {"prompt": self.forecast.prompt.bottleneck, "decode": self.forecast.decode.bottleneck},
            "memory": self._memory(),
            "gains": [asdict(gain) for gain in self.gains],
            "experts": self.experts.fields() if self.experts else None,
            "reasons": reasons(self.problem, self.chosen),
            "compared": self.chosen.compared,
        }

    def _segments(self, kind: str) -> dict[str, Any]:
        lying = {tier: {"count": count, "bytes": nbytes} for tier, (count, nbytes) in self.lying(kind).items()}
        return {"lie": lying, "computed": self.computed(kind)}

    def _memory(self) -> dict[str, Any]:
        machine = self.node.machine
        found = {"ram": asdict(self.peaks.host) | {"total": self.peaks.host.total, "limit": machine.memory}}
        for number, (gpu, card) in enumerate(zip(self.peaks.cards, machine.cards, strict=False), 1):
            found[numbered("gpu", number)] = asdict(gpu) | {"total": gpu.total, "limit": card.memory}
        return found


def _without_demand(case: Case) -> Candidate[OffloadChoice]:
    """Return the plan in which weights move in a cycle or not at all, to compare it with experts on demand."""
    return choose(replace(case, options=replace(case.options, pipeline="performance")))


def numbered(name: str, number: int) -> str:
    """Return a name with the number of the accelerator, as `scheduler.model.offload.tasks.busy_seconds` names lanes."""
    return name if number == 1 else f"{name} {number}"


def _percent(phase: PhaseForecast) -> dict[str, float]:
    return {lane: round(_PERCENT * part, 1) for lane, part in phase.use.items()}


def _finite(value: float) -> float | None:
    """Return `value`, or None for infinity, which JSON does not have."""
    return value if value < float("inf") else None

"""Experts that are loaded to an accelerator on demand: whether that is planned, and the report on it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from master.planning.shapes import ModelShape
from scheduler.demand.choice.cliff import GUARDED
from scheduler.demand.choice.first import warmed, worthiest
from scheduler.demand.choice.select import select
from scheduler.demand.policies import Key
from scheduler.model.experts.forecast import DemandForecast, ExpertWork, best_demand, split_routed
from scheduler.model.offload.problem import Problem
from tpi.pack.blockfile import BlockShape
from worker.plan.modes.experts import hit_rate_of, recording_of


@dataclass(frozen=True)
class ExpertsReport:
    """The forecast for experts on demand; `problem` has each routed expert in a segment of its own.

    `keys` are the experts. `still` is the time in seconds that the request takes if no weights move.
    """

    work: ExpertWork
    problem: Problem
    forecast: DemandForecast
    keys: tuple[Key, ...]
    routing: bytes
    still: float

    @property
    def pays(self) -> bool:
        """True if it is faster than if no weights move, and not all experts fit on the accelerator anyway."""
        return self.forecast.seconds < self.still and self.forecast.slots < self.work.units

    @cached_property
    def there(self) -> list[int]:
        """How many experts of each layer would be on the accelerator at first, for layers with experts."""
        recording = recording_of(self.routing, self.keys)
        choice = select(recording, self.forecast.slots).choice if recording is not None else GUARDED
        first = worthiest(warmed(choice, self.keys, recording), self.keys, self.forecast.slots)
        counts = Counter(block for block, _ in first)
        return [counts[block] for block in dict.fromkeys(block for block, _ in self.keys)]

    def lines(self) -> list[str]:
        """Return the sentences for the user."""
        found, there, each = self.forecast, self.there, self.work.experts
        span = f"{min(there)}" if min(there) == max(there) else f"{min(there)} to {max(there)}"
        known = "as recorded" if self.routing else "as if all were as likely; tpi profile records what they are"
        faster = self.still / found.seconds
        return [
            f"experts come to the GPU as they are wanted: {found.slots} of {self.work.units} lie there at once, "
            f"at first {span} of {each} of each layer; all lie in RAM",
            f"of the chosen {found.hit_rate:.0%} are expected there ({known}), {found.fetched:.0%} fetched, the CPU "
            f"computes {found.computed_here:.0%}: {faster:.2f} times as fast as --pipeline performance",
        ]

    def fields(self) -> dict[str, Any]:
        """Return the object for `--json`."""
        found = self.forecast
        return {
            "slots": found.slots,
            "experts": self.work.units,
            "there_by_layer": self.there,
            "of_each_layer": self.work.experts,
            "hit_rate": found.hit_rate,
            "recorded": bool(self.routing),
            "fetched": found.fetched,
            "computed_by_cpu": found.computed_here,
            "seconds_if_nothing_moves": self.still,
        }


def planned_demand(shape: ModelShape, problem: Problem, still: float) -> ExpertsReport | None:
    """Return the report on experts on demand, or None if they are not possible.

    `still` is the time in seconds that a request takes if no weights move.
    """
    work, keys = _experts(shape), _keys(shape)
    if work is None:
        return None
    split = replace(problem, work=split_routed(problem.work))
    found = best_demand(split, work, hit_rate_of(shape.routing, keys))
    return None if found is None else ExpertsReport(work, split, found, tuple(keys), shape.routing, still)


def _experts(shape: ModelShape) -> ExpertWork | None:
    mixture, blocks = shape.config.mixture, _blocks(shape)
    if mixture is None or not blocks:
        return None
    run = next(run for run in blocks[0].runs if run.name == "neuron")
    units = run.units // mixture.experts
    return ExpertWork(
        blocks=len(blocks),
        experts=mixture.experts,
        used=mixture.used,
        nbytes=units * run.unit_bytes,
        weights=units * run.width * run.hidden * len(run.parts),
        shared=sum(run.units * run.unit_bytes for run in blocks[0].runs if run.name == "shared"),
    )


def _keys(shape: ModelShape) -> Sequence[Key]:
    count = shape.config.mixture.experts if shape.config.mixture else 0
    return [(block, expert) for block in range(len(_blocks(shape))) for expert in range(count)]


def _blocks(shape: ModelShape) -> list[BlockShape]:
    return [block for block in shape.blocks if block.kind == "experts"]

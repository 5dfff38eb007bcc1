"""The report on experts that are loaded to an accelerator on demand."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from scheduler.demand.choice.cliff import DEFAULT_POLICY
from scheduler.demand.choice.first import trained_policy, units_to_keep
from scheduler.demand.choice.select import select
from scheduler.model.experts.forecast import DemandForecast
from worker.node_plan import NodePlan
from worker.plan.modes.experts import CardSlots, recording_of, routed_experts


@dataclass(frozen=True)
class ExpertsReport:
    """The accelerator's slots for experts.

    `still` is the predicted seconds of the request if no expert is loaded on demand.
    """

    plan: NodePlan
    slots: CardSlots
    still: float

    @property
    def forecast(self) -> DemandForecast:
        """The forecast with the accelerator's slots for experts."""
        return self.slots.forecast

    @cached_property
    def there(self) -> list[int]:
        """The number of each layer's experts on the accelerator at first, for layers with experts."""
        keys = [key for key, _ in routed_experts(self.plan)]
        recording = recording_of(self.plan.routing, keys)
        choice = select(recording, self.slots.slots).choice if recording is not None else DEFAULT_POLICY
        first = units_to_keep(trained_policy(choice, keys, recording), keys, self.slots.slots)
        counts = Counter(block for block, _ in first)
        return [counts[block] for block in dict.fromkeys(block for block, _ in keys)]

    @property
    def _each(self) -> int:
        """Number of experts in each layer that has experts."""
        return self.slots.expert_count // len(self.there)

    def lines(self) -> list[str]:
        """Return the sentences of the report, for the user."""
        found, there, each = self.forecast, self.there, self._each
        span = f"{min(there)}" if min(there) == max(there) else f"{min(there)} to {max(there)}"
        known = (
            "as recorded"
            if self.plan.routing
            else "assuming that all are equally likely; tpi profile measures their use"
        )
        faster = self.still / found.seconds
        held, of = self.slots.slots, self.slots.expert_count
        return [
            f"experts are copied from RAM to the GPU when chosen: {held} of {of} fit there, at first {span} of {each} "
            "of each layer",
            f"of the chosen experts, {found.hit_rate:.0%} are expected there ({known}), {found.fetched:.0%} are copied "
            f"and the CPU computes {found.computed_on_host:.0%}: {faster:.2f} times as fast as --pipeline performance",
        ]

    def fields(self) -> dict[str, Any]:
        """Return the fields of the report, for `--json`."""
        found = self.forecast
        return {
            "slots": self.slots.slots,
            "experts": self.slots.expert_count,
            "there_by_layer": self.there,
            "of_each_layer": self._each,
            "hit_rate": found.hit_rate,
            "recorded": bool(self.plan.routing),
            "fetched": found.fetched,
            "computed_by_cpu": found.computed_on_host,
            "seconds_if_nothing_moves": self.still,
        }

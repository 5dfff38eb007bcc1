"""Is an expert that is not on the accelerator taken there, or computed by the CPU where it lies? Whichever is sooner.

Both sides compute at the same time and a block is over when the slower one is, so it is not one expert's t_copy + t_gpu
against its t_cpu, but the largest of what both sides come to: taking one there also frees the CPU for the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.model.machine import DeviceLink, NodeMachine, Rates
from tpi.errors import PlanError


@dataclass(frozen=True)
class ExpertCosts:
    """Seconds of one expert's slice: `nbytes` bytes of `weights` weights.

    `before` is what the accelerator takes before its first expert: what crosses, and the shared experts.
    """

    host: Rates
    there: Rates
    link: DeviceLink
    nbytes: int
    weights: int
    before: float = 0.0

    @classmethod
    def of(cls, machine: NodeMachine, nbytes: int, weights: int, hidden: int, shared: int = 0) -> "ExpertCosts":
        """On the first accelerator of `machine`; `hidden` bytes cross each way, `shared` bytes of others are computed.

        Raises:
            PlanError: if there is no accelerator.
        """
        card = machine.accelerator
        if card is None:
            raise PlanError("experts are shared out between a CPU and an accelerator; name one with --device")
        before = 2 * card.link.latency + hidden / card.link.up + hidden / card.link.down
        before += card.rates.start + card.rates.seconds(shared, 0.0) if shared else 0.0
        return cls(machine.host, card.rates, card.link, nbytes, weights, before)

    @property
    def copying(self) -> float:
        """Taking it there."""
        return self.link.latency + self.nbytes / self.link.up

    def computing(self, rates: Rates, tokens: float) -> float:
        """For so many tokens, beside the beginning of the call."""
        return rates.seconds(self.nbytes, 2.0 * self.weights * tokens)


@dataclass(frozen=True)
class ExpertDivision:
    """So many of the absent experts are `fetched`, and the block takes `seconds`."""

    fetched: int
    seconds: float


def divide(
    costs: ExpertCosts, there: Sequence[float], absent: Sequence[float], most: int | None = None
) -> ExpertDivision:
    """The best number of absent experts to fetch, at most `most`; the fewest of those that are as good.

    `there` and `absent` have the tokens of each expert that is wanted. The absent are fetched in their order, each
    computed when it is there; the CPU computes the others.
    """
    count = len(absent) if most is None else min(most, len(absent))
    accelerator = costs.before + costs.there.start if there else 0.0
    accelerator += sum(costs.computing(costs.there, tokens) for tokens in there)
    here = [costs.computing(costs.host, tokens) for tokens in absent]
    left = sum(here)
    best = ExpertDivision(0, max(accelerator, left + costs.host.start if absent else 0.0))
    accelerator = accelerator or costs.before
    for fetched, tokens in enumerate(absent[:count], 1):
        start = max(accelerator, fetched * costs.copying) + costs.there.start
        accelerator = start + costs.computing(costs.there, tokens)
        left -= here[fetched - 1]
        seconds = max(accelerator, left + costs.host.start if fetched < len(absent) else 0.0)
        if seconds < best.seconds * (1 - 1e-9):
            best = ExpertDivision(fetched, seconds)
    return best

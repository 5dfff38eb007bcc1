"""The choice for each expert outside the accelerator: to copy it there, or to compute it on the CPU.

Both sides compute at the same time, and a block ends when the slower side has ended. So the choice does not compare one
expert's t_copy + t_gpu with its t_cpu, but the total times of the two sides: copying an expert also frees the CPU for
other experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.model.machine import DeviceLink, NodeMachine, Rates
from tpi.errors import PlanError


@dataclass(frozen=True)
class ExpertCosts:
    """Seconds of one expert's slice, of `nbytes` bytes and `weights` weights, on the host and the accelerator.

    `host` and `accelerator` are the rates of the two. `before` is the seconds that the accelerator takes before its
    first expert, for hidden states and shared experts.
    """

    host: Rates
    accelerator: Rates
    link: DeviceLink
    nbytes: int
    weights: int
    before: float = 0.0

    @classmethod
    def of(cls, machine: NodeMachine, nbytes: int, weights: int, hidden: int, shared: int = 0) -> "ExpertCosts":
        """Return the costs on the first accelerator of `machine`.

        Args:
            machine: the node.
            nbytes: bytes of one expert's slice.
            weights: weights of one expert's slice.
            hidden: bytes of hidden states that cross the link in each direction.
            shared: bytes of shared experts that the accelerator computes.

        Raises:
            PlanError: if the machine has no accelerator.
        """
        card = machine.accelerator
        if card is None:
            raise PlanError("this node has no accelerator to share experts with; name one with --device")
        before = 2 * card.link.latency + hidden / card.link.up + hidden / card.link.down
        before += card.rates.start + card.rates.seconds(shared, 0.0) if shared else 0.0
        return cls(machine.host, card.rates, card.link, nbytes, weights, before)

    @property
    def copying(self) -> float:
        """Seconds to copy an expert to the accelerator."""
        return self.link.latency + self.nbytes / self.link.up

    def computing(self, rates: Rates, tokens: float) -> float:
        """Return the seconds to compute an expert for `tokens` tokens at `rates`, without the start of the call."""
        return rates.seconds(self.nbytes, 2.0 * self.weights * tokens)


@dataclass(frozen=True)
class ExpertDivision:
    """A choice for a block: the number of absent experts that are `fetched`, and the seconds of the block."""

    fetched: int
    seconds: float


def divide(
    costs: ExpertCosts, there: Sequence[float], absent: Sequence[float], most: int | None = None
) -> ExpertDivision:
    """Return the best number of absent experts to fetch, at most `most`; the smallest of equally good ones.

    Experts are fetched in the order of `absent`, and each is computed once it has arrived; the CPU computes the others.

    Args:
        costs: the seconds of one expert.
        there: the tokens of each wanted expert that is on the accelerator.
        absent: the tokens of each wanted expert that is not on the accelerator.
        most: the most experts to fetch; None: all.
    """
    count = len(absent) if most is None else min(most, len(absent))
    accelerator = costs.before + costs.accelerator.start if there else 0.0
    accelerator += sum(costs.computing(costs.accelerator, tokens) for tokens in there)
    here = [costs.computing(costs.host, tokens) for tokens in absent]
    left = sum(here)
    best = ExpertDivision(0, max(accelerator, left + costs.host.start if absent else 0.0))
    accelerator = accelerator or costs.before
    for fetched, tokens in enumerate(absent[:count], 1):
        start = max(accelerator, fetched * costs.copying) + costs.accelerator.start
        accelerator = start + costs.computing(costs.accelerator, tokens)
        left -= here[fetched - 1]
        seconds = max(accelerator, left + costs.host.start if fetched < len(absent) else 0.0)
        if seconds < best.seconds * (1 - 1e-9):
            best = ExpertDivision(fetched, seconds)
    return best

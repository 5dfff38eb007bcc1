"""Figures of a run while it goes on."""

from collections.abc import Sequence
from dataclasses import dataclass

from master.reporting.report import NodeReport
from master.reporting.spans import nothing
from tpi.config import ModelConfig
from tpi.net.questions import Stats
from tpi.partition import Range
from tpi.topology.links import LinkTable


@dataclass(frozen=True)
class LiveFigures:
    """Every node of one deployment at one moment, rank 0 first."""

    nodes: list[NodeReport]  # per token since some earlier moment
    experts: list[Range]  # which routed experts each holds
    totals: list[Stats]
    moved: bool  # whether tokens were computed since that moment
    whole: dict[str, int]  # what there is to hold, by kind
    collective: str
    wire: str
    links: LinkTable | None = None  # as measured, where they are

    @property
    def epoch(self) -> int:
        """The deployment's number."""
        return self.totals[0].epoch

    @property
    def used_bytes(self) -> list[int]:
        """The most memory that each has taken so far above its bare process."""
        return [max(0, node.peak_rss_bytes - node.bare_rss_bytes) for node in self.nodes]


def since(begun: Sequence[Stats] | None, after: Sequence[Stats]) -> list[Stats]:
    """The totals to count from: `begun` if it is of the same deployment, else none at all."""
    if begun and [(one.epoch, one.session) for one in begun] == [(one.epoch, one.session) for one in after]:
        return list(begun)
    return [nothing(stats) for stats in after]


def whole_model(config: ModelConfig) -> dict[str, int]:
    """What all nodes hold together of a layer; `neurons` of a dense block, or else of each routed expert."""
    mixture = config.mixture
    return {
        "layers": config.layers,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "neurons": config.intermediate,
        "expert_neurons": mixture.width if mixture else 0,
        "experts": mixture.experts if mixture else 0,
    }

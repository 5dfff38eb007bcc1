"""Figures of a run in progress."""

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
    """Figures of every node of one deployment at one moment, rank 0 first."""

    nodes: list[NodeReport]  # per token since an earlier moment
    experts: list[Range]  # the routed experts that each node holds
    totals: list[Stats]
    moved: bool  # whether tokens were computed since that moment
    whole: dict[str, int]  # number of units of the whole model, by kind
    collective: str
    wire: str
    links: LinkTable | None = None  # the measured links, if any

    @property
    def epoch(self) -> int:
        """The number of the present deployment."""
        return self.totals[0].epoch

    @property
    def used_bytes(self) -> list[int]:
        """The maximum memory of each node so far, in bytes above its bare process, rank 0 first."""
        return [max(0, node.peak_rss_bytes - node.bare_rss_bytes) for node in self.nodes]


def since(begun: Sequence[Stats] | None, after: Sequence[Stats]) -> list[Stats]:
    """Return the totals to count from: `begun` if it belongs to the deployment of `after`, else zeros."""
    if begun and [(one.epoch, one.session) for one in begun] == [(one.epoch, one.session) for one in after]:
        return list(begun)
    return [nothing(stats) for stats in after]


def whole_model(config: ModelConfig) -> dict[str, int]:
    """Return the units of the whole model, by kind: `neurons` of a dense block, `expert_neurons` of one expert."""
    mixture = config.mixture
    return {
        "layers": config.layers,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "neurons": config.intermediate,
        "expert_neurons": mixture.width if mixture else 0,
        "experts": mixture.experts if mixture else 0,
    }

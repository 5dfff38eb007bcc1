"""Plans of batches that keep some share of the weights, the rest of which passes through in some number of chunks."""

from dataclasses import replace
from typing import Any

from scheduler.model.machine import NodeMachine
from scheduler.model.roofline.search import best_policy
from tpi.devices.options import OffloadOptions
from tpi.kernels import Kernels
from worker.pipelines.chunks.cutting import Chunking
from worker.pipelines.decide import Decide
from worker.pipelines.plan import BatchPlan, batch_problem, planned_batch
from worker.plan.fit import Tables
from worker.plan.node_plan import NodePlan


def in_chunks(kept: float, chunks: int) -> Decide:
    """Plans that keep the share `kept`, and have each layer pass in so many chunks, however small."""

    def decide(plan: NodePlan, machine: NodeMachine, options: OffloadOptions, tables: Tables | None) -> BatchPlan:
        asked = batch_problem(plan, machine, options, tables)
        policy = replace(best_policy(asked).policy, weights_kept=kept)
        return planned_batch(plan, asked, policy, options, tables, Chunking(chunks, least=1))

    return decide


class Counted:
    """Kernels that count their calls by name. See `tpi.kernels.Kernels`."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        self.calls[name] = self.calls.get(name, 0) + 1
        return getattr(self._kernels, name)

"""Plans of batches with a given share of resident weights; the rest is streamed in a given number of chunks."""

from dataclasses import replace
from typing import Any

from scheduler.model.roofline.search import best_policy
from tpi.kernels import Kernels
from worker.plan.case import Candidate, Case
from worker.plan.choose import Choose
from worker.plan.chunks import Chunking
from worker.plan.modes.batch import BatchSettings, problem_of, with_policy


def in_chunks(kept: float, chunks: int) -> Choose:
    """Return a planner with the share `kept` of weights resident, and each layer streamed in `chunks` chunks."""

    def decide(case: Case) -> Candidate[BatchSettings]:
        asked = problem_of(case)
        policy = replace(best_policy(asked).policy, weights_kept=kept)
        return with_policy(case, asked, policy, Chunking(chunks, least=1))

    return decide


class Counted:
    """A `tpi.kernels.Kernels` that counts the calls by name."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        self.calls[name] = self.calls.get(name, 0) + 1
        return getattr(self._kernels, name)

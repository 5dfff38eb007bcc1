"""The layer for multi-token prediction in a plan: its memory on the master, and its seconds for a drafted token."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from master.deployment.mtp import one_layer, words
from master.planning.home.dealing import HomeModel
from master.planning.home.forecast import HomeForecast
from master.planning.problem import planning_case, planning_problem
from master.planning.shapes import ModelShape
from scheduler.model.machine import NodeMachine
from scheduler.model.offload.choice import choose
from scheduler.model.offload.forecast import decode_forecast
from scheduler.model.offload.work import Workload
from tpi.errors import PlanError
from tpi.kernels.kv import KvDtype
from tpi.pack.blockfile import BlockShape
from tpi.text import short_number
from worker.plan.fit import fit

_MS = 1e3
_PLENTY = 1 << 60  # bytes of memory for the forecast of its speed: the layer is either resident or not loaded


@dataclass(frozen=True)
class MtpForecast:
    """The layer for multi-token prediction on the master.

    Attributes:
        shapes: the shapes of the layer's projection, norms and blocks.
        nbytes: bytes of memory that it takes; None if it does not fit, so that it does not draft.
        seconds: seconds to draft a token.
    """

    shapes: tuple[BlockShape, ...]
    nbytes: int | None
    seconds: float

    @classmethod
    def of(
        cls, shape: ModelShape, machine: NodeMachine, used: int, request: Workload, kv_dtype: KvDtype | None
    ) -> "MtpForecast":
        """Return the forecast for the layer of `shape`, loaded as `master.deployment.mtp.open_mtp` loads it.

        Args:
            shape: the model, which has such a layer.
            machine: the master's machine.
            used: bytes of the machine's memory that the model's plan uses.
            request: the requests that are planned for.
            kv_dtype: the format of keys and values; None: as for `tpi run`.
        """
        projection, _, *blocks = shape.mtp
        own = replace(
            shape, config=one_layer(shape.config, request.context), blocks=tuple(blocks), routing=b"", per_layer=()
        )
        left = replace(machine, memory=max(1, machine.memory - used - projection.nbytes))
        plan = planning_case(own, left, request, None, kv_dtype).plan
        resident = replace(plan, options=replace(plan.options, scheduler="resident"))
        alone = planning_problem(own, replace(machine, memory=_PLENTY), request, None, kv_dtype)
        seconds = decode_forecast(alone, choose(alone).offload).seconds + projection.nbytes / machine.host.read
        try:
            return cls(shape.mtp, fit(resident).used + projection.nbytes, seconds)
        except PlanError:
            return cls(shape.mtp, None, seconds)

    @property
    def drafting(self) -> float:
        """Seconds to draft a token; 0 if the layer does not fit, because drafts by lookup take no time."""
        return 0.0 if self.nbytes is None else self.seconds

    def words(self) -> str:
        """Return the sentence that a run prints about the layer's memory, with the time to draft a token."""
        time = f"; it drafts a token in {short_number(_MS * self.seconds)} ms" if self.drafting else ""
        return words(self.shapes, self.nbytes) + time

    def fields(self) -> dict[str, Any]:
        """Return the object for `--json`, in bytes and seconds."""
        return {name: value for name, value in asdict(self).items() if name != "shapes"}


def mtp_at_home(model: HomeModel, ahead: HomeForecast) -> MtpForecast | None:
    """Return the forecast for the model's layer on the master of a home, next to the plan `ahead`.

    Return None if the model has no such layer, or if a run would not draft.
    """
    if not model.shape.mtp or model.home.cards or (model.shape.config.mixture and ahead.reads):
        return None
    own = (each.memory.total for each in ahead.members if each.rank == 0)
    used = next(own, model.staged.nodes[0].fixed)
    return MtpForecast.of(model.shape, model.home.machines[0], used, model.request, model.kv_dtype)

"""Forecasts for recommended models on this machine and its workers: memory, and tokens per second."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from master.joining.discovery import willing_at_home
from master.models.recommended import Recommended
from master.options import worker_addresses
from master.planning.home.asked import home_asked, home_of_neighbours
from master.planning.home.dealing import HomeModel
from master.planning.home.forecast import best_forecast
from master.planning.home.members import Home
from master.planning.node import NodeFlags, planned_node
from master.planning.problem import request_of
from master.planning.shapes import weight_bytes
from tpi.errors import PlanError
from tpi.keys.policy import KeyPolicy
from tpi.progress import warn


@dataclass(frozen=True)
class ModelForecast:
    """The forecast for one model on this machine and its workers.

    Attributes:
        nbytes: bytes of its weights.
        rate: tokens per second of an answer; None if the model does not run.
        machines: the number of machines that take part.
        from_disk: True if some weights are read from disk for each token.
    """

    model: Recommended
    nbytes: int
    rate: float | None = None
    machines: int = 0
    from_disk: bool = False

    @classmethod
    def of(cls, model: Recommended, home: Home) -> "ModelForecast":
        """Return the forecast for answers to prompts of 512 tokens, as `tpi plan` makes it."""
        shape = model.shape()
        asked = HomeModel(shape, home, request_of(shape.config, None, None, 1, None))
        try:
            ahead = best_forecast(asked)
        except PlanError:
            return cls(model, weight_bytes(shape))
        streamed = any(member.disk_bytes for member in ahead.members)
        return cls(model, weight_bytes(shape), 1 / ahead.token, len(ahead.members), streamed)

    def fields(self) -> dict[str, Any]:
        """Return the object for `--json`: bytes, and tokens per second."""
        return {
            "model": self.model.name,
            "good_for": self.model.good,
            "parameters": round(self.model.parameters * 1e9),
            "weight_bytes": self.nbytes,
            "decode_tokens_per_s": self.rate,
            "machines": self.machines,
            "from_disk": self.from_disk,
        }


def house(cache: Path, policy: KeyPolicy) -> Home:
    """Return this machine, measured, and the workers of TPI_WORKERS or else the paired ones that can be used now."""
    files = sorted((cache / "packs").glob("*/*.safetensors"))  # on the disk that would be read
    own = planned_node(NodeFlags(), cache, files).machine
    addresses = worker_addresses((os.environ.get("TPI_WORKERS", ""),)) or willing_at_home(policy, warn, using=warn)
    return home_asked(addresses, own, policy) if addresses else home_of_neighbours(own, ())

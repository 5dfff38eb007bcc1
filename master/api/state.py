"""What all routes share: the core, the model's name, the limits."""

import time
from dataclasses import dataclass, field

from starlette.requests import Request

from master.api.answers.service import Service
from master.api.failures import RequestError
from master.api.metrics import ServerMetrics
from master.api.page.house import House


@dataclass(frozen=True)
class ServeLimits:
    """Bounds on what one client may do. Seconds and bytes."""

    body_bytes: int = 4 << 20
    bodies_bytes: int = 32 << 20  # of all bodies under way
    body_s: float = 30.0  # in which a body has to arrive
    answer_s: float = 600.0
    waiting: int = 256  # requests beyond those that run


@dataclass(frozen=True)
class ApiState:
    """One running server."""

    service: Service
    model: str
    metrics: ServerMetrics
    limits: ServeLimits = ServeLimits()
    house: House | None = None  # what the page shows of the nodes
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> None:
        """Raises RequestError if a client wants another model than there is."""
        if name is not None and name != self.model:
            said = f"there is no model {name[:100]!r} here; this server has {self.model!r}"
            raise RequestError(said, "model", "model_not_found", 404)

    def client(self, request: Request) -> str:
        """Who asks, for a fair order."""
        return request.client.host if request.client else ""

    def retry_after(self) -> int:
        """Seconds after which it is worth asking again."""
        return self.metrics.retry_after(self.service.engine)

"""What all routes share: the core, the model's name, the limits."""

import time
from dataclasses import dataclass, field

from starlette.requests import Request

from master.api.answers.service import Service
from master.api.failures import RequestError
from master.api.left_out import LeftOutNotes
from master.api.metrics import ServerMetrics
from master.api.page.house import House
from master.api.senders import Sender
from master.generation.client import Client


@dataclass(frozen=True)
class ServeLimits:
    """Bounds on what one client may do. Seconds and bytes."""

    body_bytes: int = 4 << 20
    bodies_bytes: int = 32 << 20  # of all bodies under way, without the beginning of each
    small_body_bytes: int = 16 << 10  # that beginning: connections are bounded, and so is this
    body_s: float = 30.0  # in which a body has to arrive
    answer_s: float = 600.0
    waiting: int = 256  # requests beyond those that run


@dataclass(frozen=True)
class ApiState:
    """One running server."""

    service: Service
    models: tuple[str, ...]  # all names of the one model, the first by default
    metrics: ServerMetrics
    limits: ServeLimits = ServeLimits()
    house: House | None = None  # what the page shows of the nodes
    left_out: LeftOutNotes = field(default_factory=LeftOutNotes)
    created: int = field(default_factory=lambda: int(time.time()))

    def named(self, name: str | None) -> str:
        """Return what the answer calls the model, as the client did; raises RequestError if it wants another one."""
        if name is not None and name not in self.models:
            said = f"there is no model {name[:100]!r} here; this server has {' and '.join(map(repr, self.models))}"
            raise RequestError(said, "model", "model_not_found", 404)
        return self.models[0] if name is None else name

    def client(self, request: Request, *salts: str | None) -> Client:
        """Return the client of the engine's requests; its cached prefixes are kept apart by `salts`, too."""
        found = sender(request)
        return Client(found.name, found.salted(salts))

    def retry_after(self) -> int:
        """Seconds after which it is worth asking again."""
        return self.metrics.retry_after(self.service.engine)


def sender(request: Request) -> Sender:
    """Return the sender of a request, as `master.api.guard.Guard` found it."""
    found = request.scope["state"]["sender"]
    assert isinstance(found, Sender)
    return found

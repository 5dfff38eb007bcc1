"""The state that all routes share: the core, the model's names, the limits."""

import time
from dataclasses import dataclass, field

from starlette.requests import Request

from master.api.answers.service import Service
from master.api.failures import RequestError
from master.api.metrics import ServerMetrics
from master.api.page.nodepanel import NodePanel
from master.api.senders import Sender
from master.api.unsupported_tools import UnsupportedToolReports
from master.generation.client import Client


@dataclass(frozen=True)
class ServeLimits:
    """Limits for clients. The suffix of a name is its unit; `waiting` is a number of requests."""

    body_bytes: int = 4 << 20
    bodies_bytes: int = 32 << 20  # of all bodies being read, without the first `small_body_bytes` of each
    small_body_bytes: int = 16 << 10  # not counted in `bodies_bytes`; the limit of connections bounds these
    body_s: float = 30.0  # time for a body to arrive
    answer_s: float = 600.0
    waiting: int = 256  # requests in addition to the running ones


@dataclass(frozen=True)
class ApiState:
    """The state that the routes of one running server share."""

    service: Service
    models: tuple[str, ...]  # all names of the model; the first is the default
    metrics: ServerMetrics
    limits: ServeLimits = ServeLimits()
    panel: NodePanel | None = None  # the nodes' figures for the page
    left_out: UnsupportedToolReports = field(default_factory=UnsupportedToolReports)
    created: int = field(default_factory=lambda: int(time.time()))

    def named(self, name: str | None) -> str:
        """Return the model name for the answer, by default the first; raise RequestError if `name` is another model."""
        if name is not None and name not in self.models:
            said = f"there is no model {name[:100]!r}; this server has {' and '.join(map(repr, self.models))}"
            raise RequestError(said, "model", "model_not_found", 404)
        return self.models[0] if name is None else name

    def client(self, request: Request, *salts: str | None) -> Client:
        """Return the engine's client for a request. Only requests with the same `salts` share cached prefixes."""
        found = sender(request)
        return Client(found.name, found.salted(salts))

    def retry_after(self) -> int:
        """Return the seconds after which a refused client should try again."""
        return self.metrics.retry_after(self.service.engine)


def sender(request: Request) -> Sender:
    """Return the sender of a request, as found by `master.api.guard.Guard`."""
    found = request.scope["state"]["sender"]
    assert isinstance(found, Sender)
    return found

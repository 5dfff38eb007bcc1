"""One server from its start to its end."""

import socket
from collections.abc import Sequence
from contextlib import ExitStack, closing

import click

from master.api.answers.service import Service
from master.api.app import make_app
from master.api.guard import Access
from master.api.metrics import ServerMetrics
from master.api.page.house import House
from master.api.server import ApiServer, url_of
from master.api.state import ApiState, ServeLimits
from master.generation.thread import EngineThread
from master.session import Session


def run_server(
    session: Session,
    model: str,
    listening: socket.socket,
    access: Access,
    limits: ServeLimits,
    origins: Sequence[str] = (),
) -> None:
    """Serve until a signal; the session's engine is this server's meanwhile."""
    metrics, engine = ServerMetrics(model), EngineThread(session.engine, limits.waiting, session.engine.recover)
    metrics.watch(engine)
    engine.start()
    with ExitStack() as stack:
        stack.callback(engine.stop)
        service = stack.enter_context(closing(Service(engine, session.tokenizer, session.pack.config.vocab, metrics)))
        service.warm_up()
        house = House(engine, lambda: session.figures, model)
        server = ApiServer(make_app(ApiState(service, model, metrics, limits, house), access, origins), engine)
        click.echo(f"{model} is served at {url_of(listening)}; context of {service.context} tokens")
        server.run(sockets=[listening])

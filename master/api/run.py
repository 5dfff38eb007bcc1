"""The start and the end of one server."""

from collections.abc import Sequence
from contextlib import ExitStack, closing

import click

from master.api.answers.service import Service
from master.api.app import make_app
from master.api.guard import Access
from master.api.listening import Listening
from master.api.metrics import ServerMetrics
from master.api.page.nodepanel import NodePanel
from master.api.server import ApiServer
from master.api.state import ApiState, ServeLimits
from master.session import Session
from master.vocabulary.sampler import Sampling


def run_server(
    session: Session,
    models: Sequence[str],
    listening: Listening,
    access: Access,
    limits: ServeLimits,
    origins: Sequence[str] = (),
) -> None:
    """Serve the session's model under all names of `models` until SIGINT or SIGTERM."""
    model = models[0]
    metrics = ServerMetrics(model)
    with ExitStack() as stack:
        engine = stack.enter_context(session.answering(limits.waiting))
        metrics.watch(engine)
        service = stack.enter_context(closing(Service(engine, session.tokenizer, session.pack.config.vocab, metrics)))
        service.warm_up()
        panel = NodePanel(engine, lambda: session.figures, model)
        session.sampler(Sampling.of({}))  # prints the sampling settings of the model's files
        server = ApiServer(make_app(ApiState(service, tuple(models), metrics, limits, panel), access, origins), engine)
        click.echo(welcome(model, listening.urls(), service.context, bool(access.keys)))
        server.run(sockets=list(listening.sockets))


def welcome(model: str, urls: Sequence[str], context: int, needs_key: bool) -> str:
    """Return the message at the start: the URLs of the page and of the API at each address."""
    width = max(map(len, urls)) + 1
    lines = [f"  page {f'{url}/':<{width}}  API {url}/v1" for url in urls]
    if needs_key:
        lines.append("  The page asks for the API key. Programs must send it, too.")
    return "\n".join([f"{model} is served at {urls[0]}; context of {context} tokens", *lines])

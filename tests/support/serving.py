"""A server in this process: a tiny model on nodes that are threads, real sockets, real HTTP."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import httpx

from master.api.answers.service import Service
from master.api.app import make_app
from master.api.guard import Access
from master.api.listening import listen
from master.api.metrics import ServerMetrics
from master.api.server import ApiServer
from master.api.state import ApiState, ServeLimits
from master.generation.engine import Engine
from master.generation.thread import EngineThread
from master.text.tokenizer import Tokenizer
from tests.support.cluster.inprocess import in_process_deployment
from tpi.pack.reader import Pack

MODEL, ALIAS = "tiny", "gpt-tiny"
KEY = "secret"


@dataclass
class Served:
    """A running server with the base address `url`."""

    url: str
    engine: Engine
    thread: EngineThread
    server: ApiServer
    service: Service

    @property
    def pages_in_use(self) -> int:
        """The number of pages that sequences hold, between two steps."""
        pages = self.engine.deployment.pages
        return pages.total - self.thread.call(lambda: pages.free).result(60)


@contextmanager
def tiny_server(
    pack: Pack,
    cache: Path,
    limits: ServeLimits = ServeLimits(),  # noqa: B008 - it is frozen
    key: str | None = KEY,
    origins: Sequence[str] = (),
    context: int = 768,
    pool: int | None = None,
    most: int = 64,
    grace_s: float = 0.0,
    share_prefixes: bool = False,
    chunk: int = 64,
    stages: int = 1,
) -> Iterator[Served]:
    """Run a server of a tiny model, with `most` requests at once; check at the end that no page or task is left.

    The model is on two nodes, or with several `stages` on one node each.
    """
    nodes = [1.0] * max(2, stages)
    with closing(
        in_process_deployment(pack, nodes, cache, chunk, context, pool=pool, stages=str(stages))
    ) as deployment:
        engine = Engine(deployment, most)
        thread, metrics = EngineThread(engine, limits.waiting), ServerMetrics(MODEL)
        metrics.watch(thread)
        thread.start()
        service = Service(thread, Tokenizer.load(pack), pack.config.vocab, metrics)
        state = ApiState(service, (MODEL, ALIAS), metrics, limits)
        with listen("127.0.0.1", 0) as listening:
            server = ApiServer(
                make_app(state, Access((key,) if key else (), share_prefixes=share_prefixes), origins), thread, grace_s
            )
            runner = Thread(target=server.run, kwargs={"sockets": list(listening.sockets)})
            runner.start()
            try:
                yield Served(listening.url, engine, thread, server, service)
            finally:
                server.should_exit = True
                runner.join()
                service.close()
        assert thread.open == 0
        assert deployment.pages.free == deployment.pages.total


def client(served: Served, key: str | None = KEY) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=served.url, headers=headers, timeout=60)


def said(content: str = "Hello", **more: object) -> dict[str, object]:
    """Return the body of a request for a chat completion with the text `content`."""
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0, **more}

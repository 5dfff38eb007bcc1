"""The command `tpi serve`."""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from master.options import RunOptions, placement_options, quiet_option
from master.session import Session
from tpi.errors import UsageError
from tpi.flags import FiniteRange, ModelCommand, model_argument

DEFAULT_PORT = 8080
_PARALLEL = 4  # contexts for which memory is planned
KEY_VARIABLE = "TPI_API_KEY"


@click.command(cls=ModelCommand)
@model_argument
@placement_options
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen at; any other than loopback needs a key."
)
@click.option(
    "--port", default=DEFAULT_PORT, show_default=True, type=click.IntRange(0, 65535), help="Port; 0 takes a free one."
)
@click.option(
    "--api-key",
    multiple=True,
    metavar="KEY",
    help=f"API key that requests must have (default: {KEY_VARIABLE}). May be repeated, one for each person: each has a "
    "fair share, and cached prefixes of its own.",
)
@click.option(
    "--share-prefixes", is_flag=True, help="Share cached prefixes among all clients, if they trust each other."
)
@click.option(
    "--alias",
    multiple=True,
    metavar="NAME",
    help="Name of the model (default: its file or directory). May be repeated for more names.",
)
@click.option(
    "--parallel",
    type=click.IntRange(1, 256),
    help=f"Number of answers at once: memory is planned for that many full contexts, if it is available (default: "
    f"{_PARALLEL}), and stages are chosen for that many answers (default: 1).",
)
@click.option(
    "--queue", default=256, show_default=True, type=click.IntRange(0, 10_000), help="Limit of waiting requests."
)
@click.option(
    "--timeout", default=600.0, show_default=True, type=FiniteRange(min=1), help="Time limit of an answer in seconds."
)
@click.option("--cors", multiple=True, metavar="ORIGIN", help="Site whose pages may send requests. May be repeated.")
@click.option("--allow-host", multiple=True, metavar="NAME", help="Further host name of this server. May be repeated.")
@quiet_option
def serve(
    host: str,
    port: int,
    api_key: tuple[str, ...],
    share_prefixes: bool,
    alias: tuple[str, ...],
    parallel: int | None,
    queue: int,
    timeout: float,
    cors: tuple[str, ...],
    allow_host: tuple[str, ...],
    quiet: bool,
    **flags: Any,
) -> None:
    """Serve the model over HTTP, in the API forms of OpenAI and Anthropic, to many clients at once.

    /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, /v1/models, /v1/messages, /health, /metrics;
    at / a page to chat with the model and to see the nodes.
    """
    from master.api.guard import Access  # the imports that only a server needs
    from master.api.listening import is_own, listen
    from master.api.run import run_server
    from master.api.state import ServeLimits

    keys = _keys(api_key)
    if not is_own(host) and not keys:
        raise UsageError(
            f"--host {host} can be reached from the network; set a key with --api-key, or listen at 127.0.0.1"
        )
    placement = replace(RunOptions.from_flags(flags), parallel=parallel or _PARALLEL, streams=parallel or 1)
    access = Access(keys, tuple(name.lower() for name in (host, *allow_host)), share_prefixes)
    limits = ServeLimits(answer_s=timeout, waiting=queue)
    names = tuple(dict.fromkeys(filter(None, alias))) or (Path(placement.model).name or placement.model,)
    _log(quiet)
    with listen(host, port) as listening, Session(placement) as session:
        run_server(session, names, listening, access, limits, cors)


def _keys(given: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys of `--api-key` or, if there are none, the environment's key, without duplicates.

    Raises:
        UsageError: if a key has characters that an HTTP header cannot carry.
    """
    keys = [key for key in given if key] or [key for key in (os.environ.get(KEY_VARIABLE),) if key]
    if not all(key.isascii() and key.isprintable() and key == key.strip() for key in keys):
        raise UsageError(f"the key of --api-key or {KEY_VARIABLE} must be printable ASCII without spaces at its ends")
    return tuple(dict.fromkeys(keys))


def _log(quiet: bool) -> None:
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING if quiet else logging.INFO, force=True)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)

"""The command `tpi chat`."""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from master.chat.client import ChatServer
from master.chat.conversation import Conversation
from master.chat.loop import Chat, say_welcome
from master.chat.own import LocalChatBackend
from master.chat.readers import PlainReader, Reader, open_reader
from master.chat.remote import ServerChatBackend
from master.chat.showing.screen import open_screen
from master.options import RunOptions, placement_options, quiet_option, sampling_options, take_sampling
from master.reporting.output import write_trace
from master.session import Session
from master.text.prompts import checked_text
from master.vocabulary.sampler import Sampling
from tpi.config import default_cache
from tpi.errors import UsageError
from tpi.flags import ModelCommand, model_argument
from tpi.system.interrupts import exit_on_termination
from tpi.system.keyboard import echo_disabled

HISTORY, RESCUED = "chat_history", "lost-chat.json"  # file names in the cache
KEY_VARIABLE = "TPI_API_KEY"


@click.command(cls=ModelCommand)
@model_argument
@placement_options
@sampling_options
@click.option(
    "-n",
    "tokens",
    type=click.IntRange(min=1),
    help="Maximum number of tokens of an answer (default: the rest of the context).",
)
@click.option("--system", metavar="TEXT", help="System message to begin with.")
@click.option(
    "--history/--no-history", default=True, show_default=True, help="Keep a history of the input in the cache."
)
@click.option("--markdown/--no-markdown", default=True, show_default=True, help="Style Markdown at a terminal.")
@click.option("--url", metavar="URL", help="Talk to a running server, for example http://127.0.0.1:8080.")
@click.option("--api-key", metavar="KEY", help=f"The server's API key (default: {KEY_VARIABLE}).")
@quiet_option
def chat(
    tokens: int | None,
    system: str | None,
    history: bool,
    markdown: bool,
    url: str | None,
    api_key: str | None,
    quiet: bool,
    **flags: Any,
) -> None:
    """Talk to a model; the keys and values of earlier turns are reused.

    Ctrl-C stops an answer, /continue resumes it, Ctrl-D or /bye leaves, /help lists commands. When the context is
    full, the oldest turns are dropped. Lines from a pipe are answered one by one.
    """
    sampling = take_sampling(flags)
    conversation = Conversation(checked_text(system, "the system message") if system else None)
    _refuse_idle(url is not None, api_key, flags)
    if url is not None:
        cache = flags["cache"] or default_cache()
        server = ChatServer(url, api_key or os.environ.get(KEY_VARIABLE))
        _talk_to_server(server, sampling, tokens, conversation, cache, history, markdown, quiet)
        return
    if flags["model"] is None:
        raise UsageError("say which model with -m MODEL, or which server with --url URL")
    placement = RunOptions.from_flags(flags)
    with exit_on_termination():
        # imports made before the session count as memory of the bare process
        reader, screen = open_reader(placement.cache / HISTORY if history else None), open_screen(markdown)
        with _typing_kept(reader), Session(placement) as session, session.answering() as engine:
            if session.tokenizer.chat_template is None:
                raise UsageError("this model has no chat template; use tpi run --raw")
            talk = LocalChatBackend(session, engine, session.sampler(sampling), tokens, conversation, screen)
            talk.check_system(conversation.system)
            if not quiet:
                name = Path(placement.model).name or placement.model
                say_welcome(name, session.names, session.figures.describe(), talk.context)
            with _traced(session):
                Chat(talk, reader, quiet, placement.cache / RESCUED).run()


def _refuse_idle(served: bool, api_key: str | None, flags: Mapping[str, Any]) -> None:
    """Raise UsageError for an option that would have no effect.

    `served` is True if a server runs the model. `flags` are the options that apply only without a server.
    """
    if not served:
        if api_key is not None:
            raise UsageError("--api-key has no effect without --url; add --url URL, or leave --api-key out")
        return
    context = click.get_current_context()
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        if given and option.name in flags and option.name != "cache":
            raise UsageError(
                f"{option.opts[-1]} has no effect with --url, where the server runs the model; remove one of them"
            )


def _talk_to_server(
    server: ChatServer,
    sampling: Sampling,
    tokens: int | None,
    conversation: Conversation,
    cache: Path,
    history: bool,
    markdown: bool,
    quiet: bool,
) -> None:
    with exit_on_termination():
        reader = open_reader(cache / HISTORY if history else None)
        with _typing_kept(reader):
            talk = ServerChatBackend(server, sampling, tokens, conversation, open_screen(markdown))
            if not quiet:
                say_welcome(talk.model, (server.name,), "a server", talk.context)
            Chat(talk, reader, quiet, cache / RESCUED).run()


def _typing_kept(reader: Reader) -> AbstractContextManager[None]:
    """Turn off the terminal's line mode during startup, so that keys typed early appear in the first prompt."""
    return nullcontext() if isinstance(reader, PlainReader) else echo_disabled()


@contextmanager
def _traced(session: Session) -> Iterator[None]:
    """Write the session's timeline at the end of the block, even if Ctrl-C ends the chat."""
    try:
        yield
    except KeyboardInterrupt:
        write_trace(session.figures, session.placement.trace)
        raise
    write_trace(session.figures, session.placement.trace)

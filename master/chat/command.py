"""The command `tpi chat`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from master.chat.conversation import Conversation
from master.chat.loop import Chat, say_welcome
from master.chat.readers import open_reader
from master.chat.talk import Talk
from master.generation.sampler import Sampler
from master.options import RunOptions, placement_options, quiet_option, sampling_options, take_sampling
from master.reporting.output import write_trace
from master.session import Session
from master.text.prompts import checked_text
from tpi.errors import UsageError
from tpi.system.interrupts import ending

HISTORY, RESCUED = "chat_history", "lost-chat.json"  # in the cache


@click.command()
@placement_options
@sampling_options
@click.option("-n", "tokens", default=512, show_default=True, type=click.IntRange(min=1), help="Most tokens a turn.")
@click.option("--system", metavar="TEXT", help="A system message to begin with.")
@click.option("--history/--no-history", default=True, show_default=True, help="Remember what is typed, in the cache.")
@quiet_option
def chat(tokens: int, system: str | None, history: bool, quiet: bool, **flags: Any) -> None:
    """Talk in several turns; keys and values of earlier turns are kept.

    Ctrl-C stops an answer, Ctrl-D or /bye leaves, /help lists commands. Where the context is full, the oldest turns are
    dropped. Lines of a pipe are answered one by one.
    """
    sampling, placement = take_sampling(flags), RunOptions.from_flags(flags)
    conversation = Conversation(checked_text(system, "the system message") if system else None)
    with ending():
        reader = open_reader(placement.cache / HISTORY if history else None)  # what it loads counts as the bare process
        with Session(placement) as session:
            if session.tokenizer.chat_template is None:
                raise UsageError("this model has no chat template; use tpi run --raw")
            talk = Talk(session, Sampler(sampling), tokens, conversation)
            talk.check_system(conversation.system)
            if not quiet:
                name = Path(placement.model).name or placement.model
                say_welcome(name, session.names, session.figures.describe(), talk.context)
            with _traced(session):
                Chat(talk, reader, quiet, placement.cache / RESCUED).run()


@contextmanager
def _traced(session: Session) -> Iterator[None]:
    """Write the timeline at the end, and where Ctrl-C ends the chat."""
    try:
        yield
    except KeyboardInterrupt:
        write_trace(session)
        raise
    write_trace(session)

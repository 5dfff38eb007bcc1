"""The loop of a chat: it reads a message or a command and handles it. Ctrl-C ends an answer, not the chat."""

from collections.abc import Callable
from pathlib import Path

import click

from master.chat.commands import run_command
from master.chat.conversation import Turn
from master.chat.readers import Reader
from master.chat.talk import ChatBackend, said_in
from master.generation.answer import Answer
from tpi.errors import NodeError, UsageError
from tpi.system.interrupts import record_interrupts
from tpi.system.keyboard import echo_disabled
from tpi.text import plain

_LEAVING = b"\nstopping after this step; Ctrl-C once more leaves the chat\n"
_GO_ON = ": /continue goes on"


class Chat:
    """One chat. `run` returns when the user leaves."""

    def __init__(self, talk: ChatBackend, reader: Reader, quiet: bool, rescue: Path) -> None:
        """Create a chat; `rescue` is the file to write the conversation to if a worker is lost."""
        self._talk = talk
        self._reader = reader
        self._quiet = quiet
        self._rescue = rescue
        self._answering = False
        self._unfinished: Turn | None = None  # the unfinished turn before the last message or command

    def run(self) -> None:
        """Handle messages and commands until the end of the input or /bye.

        Raises:
            NodeError: if a worker is lost, or a server is lost without a terminal. The conversation is then saved to
                a file, named on stderr.
            KeyboardInterrupt: on Ctrl-C without a terminal, or on the third one during one answer.
            UsageError: for a message that cannot be answered, without a terminal.
        """
        while self._survives():
            pass

    def _survives(self) -> bool:
        """Handle one line and report errors after which the chat can continue; return False at the end of the chat."""
        try:
            return self._turn()
        except UsageError as error:
            if not self._reader.interactive:
                raise
            warn(str(error))
        except KeyboardInterrupt:
            if self._answering or not self._reader.interactive:
                raise
            click.echo("(Ctrl-D or /bye leaves)", err=True)
        except NodeError as error:
            if not self._talk.lasting or not self._reader.interactive:
                self._save_what_was_said()
                raise
            left = self._talk.conversation.unfinished
            again = "/continue goes on" if left is not None and left is not self._unfinished else "try again"
            warn(f"{error}. The conversation so far is kept: {again}, or /bye leaves")
        return True

    def _turn(self) -> bool:
        self._answering = False  # still True if the last answer failed
        line = self._reader.read()
        if line is None:
            if self._reader.interactive:
                click.echo(err=True)
            return False
        line, self._unfinished = line.strip(), self._talk.conversation.unfinished
        if line == "/bye":
            return False
        if line == "/regenerate":
            self._regenerate()
        elif line == "/continue":
            self._answer(lambda stopped: self._talk.go_on(stopped, warn))
        elif line.startswith("/") and not line.startswith("//"):
            run_command(line, self._talk, self._say)
        elif line:
            self._answer(lambda stopped: self._talk.reply(line.removeprefix("/"), stopped, warn))
        return True

    def _regenerate(self) -> None:
        if not self._talk.conversation.turns:
            raise UsageError("there is no answer yet to regenerate; write a message first")
        self._answer(lambda stopped: self._talk.regenerate(stopped, warn))

    def _answer(self, make: Callable[[Callable[[], bool]], Answer]) -> None:
        """Generate an answer, which Ctrl-C stops between two steps, and print a line of figures about it."""
        with echo_disabled(lines=True), record_interrupts(_LEAVING) as stopped:
            self._answering = True
            result = make(stopped)
            self._answering = False
        if not self._quiet:
            self._say(self._figures(result))
        elif result.finish_reason == "length":
            warn(f"the answer is {self._cut(result)}")
        if stopped() and not self._reader.interactive:
            raise KeyboardInterrupt

    def _figures(self, result: Answer) -> str:
        """Return the answer's token count, speed and use of the context, and the reason if it was cut."""
        count, used, context = result.count, self._talk.used, self._talk.context
        said = [f"{count} token{'' if count == 1 else 's'}"]
        if result.decode_rate:
            said[0] += f" at {result.decode_rate:.1f} tok/s"
        if count:
            said.append(f"the first after {result.ttft:.2f} s")
        said.append(f"context {used} of {context}")
        if result.finish_reason == "interrupted":
            said.append(f"stopped{_GO_ON}")
        elif result.finish_reason == "length":
            said.append(self._cut(result))
        if not said_in(result):
            said.append("the answer has no text, so this turn is not stored")
        return f"[{', '.join(said)}]"

    def _cut(self, result: Answer) -> str:
        """Return a phrase that says where the answer was cut and how to continue it."""
        full = self._talk.used >= self._talk.context
        return f"cut {'where the context ends' if full else f'at -n {result.count}'}{_GO_ON}"

    def _say(self, text: str) -> None:
        click.echo(text, err=True)

    def _save_what_was_said(self) -> None:
        if not self._talk.conversation.turns:
            return
        try:
            self._talk.conversation.save(self._rescue)
        except UsageError as error:
            warn(str(error))
        else:
            warn(f"the conversation is saved in {self._rescue}; /load it in the next chat")


def warn(text: str) -> None:
    """Print a warning on stderr, even with --quiet."""
    click.echo(f"tpi: {text}", err=True)


def say_welcome(model: str, names: tuple[str, ...], group: str, context: int) -> None:
    """Print the model, its nodes, and the most important keys."""
    click.echo(f"{plain(model)} on {', '.join(names)}", err=True)
    click.echo(f"{group}; context of {context} tokens", err=True)
    click.echo("/help lists commands. Ctrl-C stops an answer; Ctrl-D or /bye leaves.", err=True)

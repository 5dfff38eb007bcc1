"""Slash commands of a chat."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from master.chat.conversation import Conversation
from master.chat.talk import ChatBackend
from tpi.errors import UsageError
from tpi.paths import user_path

Say = Callable[[str], None]

CLEAR = "-"


@dataclass(frozen=True)
class Command:
    """One command. `argument` is the name of its argument in the help, empty if it has none; `run` executes it."""

    argument: str
    help: str
    run: Callable[[ChatBackend, str, Say], None]


def run_command(line: str, talk: ChatBackend, say: Say) -> None:
    """Execute a command line. The chat's loop itself handles `/bye`, `/continue` and `/regenerate`.

    Raises:
        UsageError: if the command does not exist or fails.
    """
    name, _, argument = line.partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise UsageError(f"there is no command {name}; /help lists them, and // begins a message with a slash")
    argument = argument.strip()
    if argument and not command.argument:
        raise UsageError(f"{name} takes no argument")
    command.run(talk, argument, say)


def help_text() -> str:
    """Return the help: all commands and keys."""
    rows = {f"{name} {command.argument}".rstrip(): command.help for name, command in COMMANDS.items()}
    width = max(map(len, [*rows, *_KEYS]))
    return "\n".join(f"{what:{width}}  {does}" for what, does in (rows | _KEYS).items())


def _help(talk: ChatBackend, argument: str, say: Say) -> None:
    say(help_text())


def _reset(talk: ChatBackend, argument: str, say: Say) -> None:
    talk.conversation = Conversation(talk.conversation.system)
    say("all turns are forgotten; the system message stays" if talk.conversation.system else "all turns are forgotten")


def _system(talk: ChatBackend, argument: str, say: Say) -> None:
    if not argument:
        say(talk.conversation.system or "there is no system message; /system TEXT sets it")
        return
    system = None if argument == CLEAR else argument
    talk.check_system(system)
    talk.conversation.system = system
    say("the system message is set" if system else "the system message is removed")


def _save(talk: ChatBackend, argument: str, say: Say) -> None:
    path = _path(argument, "/save")
    talk.conversation.save(path)
    say(f"{_turns(talk.conversation)} in {path}")


def _load(talk: ChatBackend, argument: str, say: Say) -> None:
    path = _path(argument, "/load")
    loaded = Conversation.load(path)
    talk.check_system(loaded.system)
    talk.conversation = loaded
    say(f"{_turns(loaded)} from {path}")


def _path(argument: str, command: str) -> Path:
    try:
        names = shlex.split(argument)
    except ValueError:
        names = [argument]
    name = names[0] if len(names) == 1 else argument
    if not name:
        raise UsageError(f"{command} needs a file name, for example {command} talk.json")
    return user_path(name)


def _turns(conversation: Conversation) -> str:
    count = len(conversation.turns)
    return f"{count} turn{'' if count == 1 else 's'}"


def _of_the_loop(talk: ChatBackend, argument: str, say: Say) -> None:
    raise AssertionError("the chat's loop handles this command")


COMMANDS = {
    "/help": Command("", "this list", _help),
    "/reset": Command("", "forget all turns", _reset),
    "/system": Command("[TEXT]", f"show the system message, or set it; {CLEAR} removes it", _system),
    "/save": Command("FILE", "write the conversation to a file", _save),
    "/load": Command("FILE", "continue a conversation from a file", _load),
    "/continue": Command("", "continue the last answer where it was cut", _of_the_loop),
    "/regenerate": Command("", "answer the last message again", _of_the_loop),
    "/bye": Command("", "leave", _of_the_loop),
}
_KEYS = {
    "Enter": "send",
    "Alt-Enter": "begin a new line; so does a backslash at the end of a line",
    "Ctrl-C": "stop the answer (/continue continues it), or clear the line",
    "Ctrl-D": "leave",
}

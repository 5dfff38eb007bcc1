"""The `tpi` command. It names its subcommands as strings and imports each one when it is called."""

import gc
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TextIO

import click

from tpi import __version__
from tpi.config import cache_advice
from tpi.errors import TpiError
from tpi.system.memory import explain_exhaustion
from tpi.system.openfiles import require_open_files
from tpi.system.streams import filter_output

_FILES = 32  # open files that each command may need at once, in addition to connections
INTERRUPTED = 130  # exit code: 128 + the number of SIGINT

COMMANDS = {
    "run": "master.commands:run",
    "chat": "master.chat.command:chat",
    "serve": "master.api.command:serve",
    "batch": "master.batch.command:batch",
    "bench": "master.commands:bench",
    "plan": "master.planning.command:plan",
    "profile": "master.profiling.command:profile",
    "worker": "worker.commands:worker",
    "ps": "master.joining.commands:ps",
    "doctor": "master.joining.commands:doctor",
    "pair": "tpi.keys.commands:pair",
    "keys": "tpi.keys.commands:keys",
    "models": "master.models.commands:models",
    "pull": "master.models.commands:pull",
    "pack": "tpi.pack.commands:pack",
    "ls": "worker.cachecommands:ls",
    "rm": "worker.cachecommands:rm",
    "testbed": "testbed.commands:testbed",
    "version": "tpi.cli:version",
}


class LazyGroup(click.Group):
    """A click group that imports a command when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the subcommands, in the order in which `COMMANDS` has them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command; None if the name is unknown."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write every subcommand with the whole first sentence of its help."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(limit=500)) for name, one in commands if one is not None])


_EXAMPLES = """\b
Examples:
  tpi run smollm2-135m "How many days are in a week?"
  tpi chat ./Llama-3.2-3B-Instruct --workers 192.168.1.7:9990
  tpi serve smollm2-135m
"""


@click.group(
    cls=LazyGroup, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXAMPLES
)
@click.version_option(__version__, message="%(version)s")
def tpi() -> None:
    """Run a language model over several machines: one model, every laptop in the house."""


@click.command()
def version() -> None:
    """Print the version."""
    click.echo(__version__)


def main() -> None:
    """Run the command line. An error becomes one sentence on stderr and an exit code, never a traceback."""
    gc.set_threshold(10_000)  # imports create many objects that stay; more passes over them took 7% of a start
    filter_output()
    os.umask(0o077)  # traces, records, shards and answers reveal prompts: only their owner may read them
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. Print errors on stderr."""

    def run() -> int:
        require_open_files(_FILES, "tpi")
        with explain_exhaustion():
            code = tpi(list(arguments), standalone_mode=False)
        return code if isinstance(code, int) else 0

    return _exit_code(run)


def _exit_code(run: Callable[[], int]) -> int:
    """Call `run` and return its result or, if it raises, print the exception on stderr and return its exit code."""
    try:
        return run()
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.ClickException as error:
        with suppress(OSError):
            error.show()
        return error.exit_code
    except TpiError as error:
        _say(str(error))
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed it
        return 1
    except OSError as error:
        way_out = cache_advice(Path(os.fsdecode(error.filename))) if isinstance(error.filename, str | bytes) else ""
        _say(f"{error.filename or 'cannot write the output'}: {error.strerror or error}{way_out and '; '}{way_out}")
        return 1
    finally:
        _flush_or_redirect(sys.stdout)


def _say(sentence: str) -> None:
    with suppress(OSError):  # stderr may be gone, or full
        click.echo(f"tpi: {sentence}", err=True)


def _flush_or_redirect(stream: TextIO | None) -> None:
    """Flush a stream; if that fails, redirect it to /dev/null, because Python would print an error at exit."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


if __name__ == "__main__":
    main()

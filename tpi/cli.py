"""The one `tpi` command: names its subcommands as strings and loads them when called."""

import sys
from importlib import import_module

import click

from tpi import __version__
from tpi.errors import TpiError

COMMANDS = {
    "run": "master.commands:run",
    "chat": "master.commands:chat",
    "bench": "master.commands:bench",
    "worker": "worker.commands:worker",
    "pull": "tpi.pack.commands:pull",
    "pack": "tpi.pack.commands:pack",
    "ls": "worker.cachecommands:ls",
    "rm": "worker.cachecommands:rm",
    "testbed": "testbed.commands:testbed",
    "version": "tpi.cli:version",
}


class LazyGroup(click.Group):
    """A click group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in `COMMANDS`, in that order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command; None if the name is unknown."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
def tpi() -> None:
    """One model, every laptop in the house: run a language model over several machines."""


@click.command()
def version() -> None:
    """Print the version."""
    click.echo(__version__)


def main() -> None:
    """Entry point: a `TpiError` becomes one sentence and its exit code, never a traceback."""
    try:
        code = tpi(standalone_mode=False)
    except click.exceptions.Exit as leave:
        code = leave.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except TpiError as error:
        click.echo(f"tpi: {error}", err=True)
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("tpi: interrupted", err=True)
        code = 130
    except BrokenPipeError:
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()

"""Commands take a model as their first word or with -m; their help begins with the most used options."""

import re
from typing import Any

import click
import pytest
from click.testing import CliRunner

from master.options import placement_options
from tpi.cli import COMMANDS, tpi
from tpi.errors import UsageError
from tpi.flags import ModelCommand, model_argument, prompt_argument


def taken(*words: str, prompt: bool = True) -> tuple[Any, ...]:
    """Return the model, and the prompt if there is one, that a command parses from these words."""
    found: list[Any] = []

    @click.command(cls=ModelCommand)
    @model_argument
    @placement_options
    def command(model: str, **flags: Any) -> None:
        found.extend([model, *([flags["prompt"]] if prompt else [])])

    if prompt:
        command = click.option("-p", "--prompt")(prompt_argument(command))
    done = CliRunner().invoke(command, words)
    if done.exception:
        raise done.exception
    return tuple(found)


@pytest.mark.parametrize(
    "words",
    ["M P", "-m M P", "M -p P", "-m M -p P", "M P -m M", "M P -p P"],
)
def test_every_order_names_the_same(words: str) -> None:
    assert taken(*words.split()) == ("M", "P")


@pytest.mark.parametrize(
    ("words", "prompt", "said"),
    [
        ((), True, "say which model"),
        (("-p", "P"), True, "say which model"),
        (("M", "P", "-m", "N"), True, "the model is given twice, as 'M' and with -m 'N'"),
        (("M", "P", "-p", "Q"), True, "the prompt is given twice, as 'P' and with -p 'Q'"),
        (("-m", "M", "P", "-p", "Q"), True, "the prompt is given twice"),
        (("M", "-m", "N"), False, "the model is given twice"),
    ],
)
def test_what_is_named_twice_or_not_at_all_is_refused(words: tuple[str, ...], prompt: bool, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        taken(*words, prompt=prompt)


def test_a_model_alone() -> None:
    assert taken("M") == ("M", None)
    assert taken("M", prompt=False) == taken("M", "-m", "M", prompt=False) == ("M",)


def options(command: str, ask: str = "--help") -> list[str]:
    """Return the flags of a command in the order of its help."""
    said = CliRunner().invoke(tpi, [command, ask]).output
    return re.findall(r"^  (--?\w[\w-]*)", said, re.MULTILINE)


@pytest.mark.parametrize(
    ("command", "first"),
    [
        ("run", ["-m", "-p", "-f", "--system", "--workers", "--local", "-n", "--temp"]),
        ("chat", ["-m", "--system", "--url", "--workers", "--local", "-n", "--temp"]),
        ("serve", ["-m", "--workers", "--local", "--host", "--port"]),
        ("batch", ["-o", "-m", "--workers"]),
        ("bench", ["-m", "--workers", "--local"]),
        ("plan", ["-m", "--workers", "--devices"]),
    ],
)
def test_help_begins_with_what_people_need(command: str, first: list[str]) -> None:
    assert options(command)[: len(first)] == first


def test_help_shows_about_twenty_flags_and_help_all_every_one() -> None:
    command = tpi.get_command(click.Context(tpi), "run")
    assert command is not None
    flags = {
        option.opts[0] for option in command.get_params(click.Context(command)) if isinstance(option, click.Option)
    }
    shown, every = set(options("run")), set(options("run", "--help-all"))
    assert 15 < len(shown) < 25
    assert shown < every
    assert every == flags


@pytest.mark.parametrize("command", ["run", "chat", "serve", "batch", "bench", "plan", "profile"])
def test_every_command_about_a_model_has_groups(command: str) -> None:
    said = CliRunner().invoke(tpi, [command, "--help"]).output
    assert re.findall(r"^([A-Z].*):$", said, re.MULTILINE)[0] == "Most used"
    assert "--help-all" in said
    assert said.count("[MODEL]") <= 1  # in the line of usage alone


def test_the_list_of_commands_is_whole_and_has_an_example() -> None:
    said = CliRunner().invoke(tpi, ["--help"]).output
    assert "..." not in said.replace("[ARGS]...", "")
    assert '\n  tpi run smollm2-135m "' in said.replace("    tpi", "  tpi")
    listed = re.findall(r"^  (\w+) {2,}\S", said.split("Commands:")[1], re.MULTILINE)
    assert listed == list(COMMANDS)

"""The pages of docs/ and the README: every command and every flag that they name exists."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from benchmarks.__main__ import _parser
from tests.support.paths import ROOT
from tpi.cli import tpi

PAGES = [ROOT / "README.md", *sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs/benchmarks.md"})]
OF_OTHERS = {"--index-url", "--base", "--pairs", "--imatrix"}  # of pip, of compare with its own parser, of llama.cpp


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield `command` and all commands below it, by their full names."""
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for word in command.list_commands(context):
            found = command.get_command(context, word)
            assert found is not None
            yield from commands(found, f"{name} {word}")


COMMANDS = dict(commands(tpi, "tpi"))
FLAGS = {
    flag
    for command in COMMANDS.values()
    for parameter in command.get_params(click.Context(command))
    for flag in (*parameter.opts, *parameter.secondary_opts)
}
BENCHMARKS = {flag for action in _parser()._actions for flag in action.option_strings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", page.read_text()))
    assert not named - FLAGS - BENCHMARKS - OF_OTHERS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"(?:`|\n|/)tpi ([a-z]+)", page.read_text()))
    assert not {f"tpi {word}" for word in named} - COMMANDS.keys()


def test_the_readme_names_every_command() -> None:
    """Except `tpi version`."""
    text = ROOT.joinpath("README.md").read_text()
    top = {name for name in COMMANDS if name.count(" ") == 1} - {"tpi version"}
    assert not {name for name in top if name not in text}


def test_every_fault_has_a_test_that_exists() -> None:
    rows = [line for line in (ROOT / "docs/faults.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 21
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row)
        assert named, row
        for path, test in named:
            assert f"\ndef {test}(" in (ROOT / "tests" / path).read_text(), f"{path} has no {test}"

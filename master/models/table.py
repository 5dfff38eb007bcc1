"""The table that `tpi models` prints, at most 80 columns wide."""

from collections.abc import Sequence

import click

from master.models.forecasts import ModelForecast
from master.planning.home.members import Home

_GB = 1e9
_FOOTNOTES = {
    "*": "part of the weights is read from disk for each token",
    "-": "the memory is too small",
}


def print_models(found: Sequence[ModelForecast], home: Home) -> None:
    """Print one line for each model: its size, its speed, its name and what it is good for."""
    width = max(len(each.model.name) for each in found)
    click.echo(_machines(home))
    click.echo(f"\n{'size':>8} {'tok/s':>7}  {'model':<{width}}  good for")
    for each in found:
        size = f"{each.nbytes / _GB:.1f} GB"
        click.echo(f"{size:>8} {_speed(each):>7}  {each.model.name:<{width}}  {each.model.good}".rstrip())
    signs = {_speed(each)[-1] for each in found}
    click.echo("".join(f"\n{sign} {text}" for sign, text in _FOOTNOTES.items() if sign in signs))
    click.echo("Sizes and speeds are for 4-bit weights: tpi run -m MODEL:Q4_K_M")
    click.echo("Without :Q4_K_M, the best file that fits is used, which may be larger.")


def _machines(home: Home) -> str:
    memory = sum(machine.memory for machine in home.machines) / _GB
    if len(home.names) == 1:
        return f"for this machine, with {memory:.1f} GB of free memory"
    return f"for this machine and {', '.join(home.names[1:])}, with {memory:.1f} GB of free memory together"


def _speed(each: ModelForecast) -> str:
    """Return the tokens per second, with a `*` if weights are read from disk; `-` if the model does not run."""
    if each.rate is None:
        return "-"
    digits = 0 if each.rate >= 10 else 1 if each.rate >= 1 else 2
    return f"{each.rate:.{digits}f}{'*' if each.from_disk else ' '}"

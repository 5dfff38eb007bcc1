"""The commands `tpi pull` and `tpi models`."""

from pathlib import Path

import click

from master.joining.discovery import addresses_of
from tpi.config import default_cache
from tpi.keys.policy import KeyPolicy
from tpi.paths import DIRECTORY

_CACHE = click.option("--cache", type=DIRECTORY, help="Directory of the models (default: ~/.cache/tpi).")


@click.command()
@click.argument("name")
@_CACHE
def pull(name: str, cache: Path | None) -> None:
    """Download the model NAME: smollm2-135m, or one of the Hugging Face hub (owner/name, owner/name:Q4_K_M).

    If a repository has several GGUF files, download the best one that fits into this machine and the paired workers.
    An interrupted download resumes where it stopped.
    """
    from master.joining.memory import house_memory
    from tpi.pack.library.hub import hub_model
    from tpi.pack.library.hubfiles import HubModel
    from tpi.pack.library.pull import pull as fetch
    from tpi.pack.library.quantisations import HouseMemory

    def house() -> HouseMemory:
        policy = KeyPolicy()
        return house_memory(None, addresses_of((), policy), policy)

    directory, model = cache or default_cache(), HubModel.parse(name)
    click.echo(hub_model(model, directory, house=house) if model else fetch(name, directory))


@click.command()
@_CACHE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list instead of the table.")
def models(cache: Path | None, as_json: bool) -> None:
    """List recommended models, with their size and how fast they would be on this machine and the paired workers."""
    from master.models.forecasts import ModelForecast, house
    from master.models.recommended import recommended
    from master.models.table import print_models
    from tpi.progress import phase
    from tpi.text import json_text

    with phase("planning"):
        home = house(cache or default_cache(), KeyPolicy())
        found = [ModelForecast.of(model, home) for model in recommended()]
    if as_json:
        click.echo(json_text([each.fields() for each in found]))
    else:
        print_models(found, home)

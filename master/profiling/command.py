"""The command `tpi profile`: a text in; a file next to the pack, a plot, and a table or one JSON object out."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from master.options import quiet_option
from tpi.config import default_cache
from tpi.errors import UsageError, WeightsError
from tpi.flags import ModelCommand, model_argument
from tpi.paths import DIRECTORY, PATH
from tpi.sparsity.usage import NeuronProfile, hot_share

if TYPE_CHECKING:
    from tpi.kernels import Kernels
    from tpi.pack.reader import Pack
    from tpi.sparsity.replay import I32

LENGTH = 256  # tokens of each sequence of the text
PLOT = "profile.svg"
_AHEAD = 3  # layers


@click.command(cls=ModelCommand)
@model_argument
@click.option("-m", "--model", help="A model as for `tpi run`; its feed-forward networks or experts are profiled.")
@click.option("--text", "text", required=True, type=PATH, help="A file of UTF-8 text.")
@click.option("--dtype", default="auto", show_default=True, help="Format of the weights, as for tpi run.")
@click.option(
    "--tokens", type=click.IntRange(min=1), help="Maximum number of tokens of the text to use (default: all)."
)
@click.option(
    "--predictors",
    is_flag=True,
    help="Also train predictors of active neurons, which look one layer ahead where that costs little. They are stored "
    "next to the pack.",
)
@click.option(
    "--split",
    default="1",
    show_default=True,
    help="Shares of the nodes that will hold the model, as for tpi run: each node gets its part of the hot neurons.",
)
@click.option("--cache", type=DIRECTORY, help="Directory for packs (default: ~/.cache/tpi).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@quiet_option
def profile(model: str, text: Path, as_json: bool, **flags: Any) -> None:
    """Count which neurons of a model a text activates, or which experts it chooses.

    Neurons are profiled if their activations are often 0 (ReLU). They then get new numbers, the most active ones first,
    which runs with --sparsity use. A node without memory for all experts chooses its cache policy by the recorded use
    of experts. An interrupted profile continues the next time.
    """
    words = _read(text)
    found = _profiled(model, words, text, flags)
    table = _routing_table if "routing" in found else _table
    click.echo(json.dumps(found) if as_json else table(found))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text; give --text a file in UTF-8") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; give --text another file") from error


def _profiled(model: str, words: str, text: Path, flags: dict[str, Any]) -> dict[str, Any]:
    from master.deployment.planner import deal_shards, parse_split, units_of
    from master.profiling.measure import profile_model
    from master.profiling.plot import figure
    from master.profiling.predictors import train_beside
    from master.text.tokenizer import Tokenizer
    from master.workers.predictors import has_records
    from tpi.kernels import open_kernels
    from tpi.pack.library.locate import open_model
    from tpi.progress import phase
    from tpi.sparsity.replay import cut_sequences
    from tpi.sparsity.usage import NAME
    from tpi.system.atomic import write_atomically

    cache = flags["cache"] or default_cache()
    shares = parse_split(flags["split"], 1 + flags["split"].count(","))
    pack = open_model(model, flags["dtype"], cache)
    if pack.config.mixture is None and not has_records(pack):
        raise UsageError(
            f"{model} needs no profile: its activations ({pack.config.activation}) are never 0, so all of its neurons "
            "are computed; give a model with ReLU or with experts"
        )
    # raises at once if there are too many nodes, not after hours of profiling
    deal_shards(pack.config, units_of(pack), shares)
    length = min(LENGTH, pack.config.context, flags["tokens"] or LENGTH)
    ids = Tokenizer.load(pack).encode(words)[: flags["tokens"]]
    if len(ids) < length:
        raise UsageError(f"{text} has {len(ids)} tokens; give --text a file of at least {length}, better of thousands")
    tokens, kernels = cut_sequences(ids, length), open_kernels()
    if pack.config.mixture is not None:
        return _routed(pack, tokens, kernels, flags["predictors"])
    with phase(f"profiling {pack.path.name}") as progress:
        use = profile_model(pack, tokens, kernels, progress)
    write_atomically(pack.path / PLOT, figure(use).encode())
    found = {"profile": str(pack.path / NAME), "plot": str(pack.path / PLOT), **_figures(use)}
    if flags["predictors"]:
        found["predictors"] = train_beside(pack, tokens, kernels)
    found["numbering"] = _numbered(pack, use, shares, cache)
    return found


def _numbered(pack: "Pack", use: NeuronProfile, shares: Sequence[float], cache: Path) -> dict[str, Any] | None:
    """Write the renumbered pack and return its figures; if the pack cannot be written, warn and return None."""
    from master.profiling.numbering import Numbering
    from tpi.progress import phase, warn

    try:
        with phase(f"renumbering neurons of {pack.path.name}") as progress:
            numbering = Numbering.of(pack, use, shares)
            numbering.keep(cache, progress)
    except WeightsError as error:
        warn(f"neurons get no new numbers: {error}")
        return None
    return numbering.figures()


def _routed(pack: "Pack", tokens: "I32", kernels: "Kernels", predictors: bool) -> dict[str, Any]:
    from master.profiling.routing import record_routing, routing_figures
    from tpi.pack.routing import NAME
    from tpi.progress import phase

    if predictors:
        raise UsageError(f"--predictors are for single neurons, and {pack.path.name} has experts; leave it out")
    with phase(f"recording which experts {pack.path.name} chooses") as progress:
        record = record_routing(pack, tokens, kernels, progress)
    return {"routing": str(pack.path / NAME), **routing_figures(record)}


def _routing_table(found: dict[str, Any]) -> str:
    from master.profiling.routing import routing_table

    return routing_table(found)


def _figures(use: NeuronProfile) -> dict[str, Any]:
    """Return the figures of a profile as JSON fields; shares are from 0 to 1.

    `foretold` has the mean of `NeuronProfile.foretold` over all layers, for each look-ahead distance in layers.
    """
    ahead = range(1, min(_AHEAD, use.layers - 1) + 1)
    return {
        "tokens": use.tokens,
        "active": float(use.frequency.mean()),
        "hot": hot_share(use.counts),
        "layers": [{"active": float(counts.mean() / use.tokens), "hot": hot_share(counts)} for counts in use.counts],
        "foretold": {str(far): _mean([use.foretold(at, far) for at in range(use.layers - far)]) for far in ahead},
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _table(found: dict[str, Any]) -> str:
    lines = ["layer  active  neurons that make 80% of the activations"]
    lines += [f"{at:5}  {one['active']:6.1%}  {one['hot']:6.1%}" for at, one in enumerate(found["layers"])]
    lines.append(f"  all  {found['active']:6.1%}  {found['hot']:6.1%}   over {found['tokens']} tokens")
    lines += [
        f"single neurons predict {share:.0%} of the neurons that are active {far} layers later"
        for far, share in found["foretold"].items()
    ]
    lines += [*_predicted(found.get("predictors")), *_renumbered(found["numbering"])]
    return "\n".join([*lines, f"stored in {found['profile']}; plot in {found['plot']}"])


def _renumbered(found: dict[str, Any] | None) -> list[str]:
    from master.profiling.numbering import numbering_line

    return [] if found is None else [numbering_line(found)]


def _predicted(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    layers = found["layers"]
    lines = ["layer  looks ahead   rank  recall  chosen for each active one"]
    lines += [
        f"{at:5}  {one['ahead']:11}  {one['rank']:5}  {one['recall']:6.1%}  {one['chosen']:6.2f}"
        for at, one in enumerate(layers)
    ]
    ahead = sum(one["ahead"] > 0 for one in layers)
    lines.append(
        f"predictors take {found['share']:.1%} of the pack's bytes; {ahead} of {len(layers)} look one layer ahead"
    )
    if short := found["short"]:
        names = ", ".join(f"{at} ({found['layers'][at]['recall']:.1%})" for at in short)
        lines.append(
            f"predictors that find less than {found['aim']:.0%} of the active neurons: "
            f"{'layers' if len(short) > 1 else 'layer'} {names}. Neurons that they miss are not computed: compare "
            "answers with those of --sparsity off, or give more text"
        )
    return lines

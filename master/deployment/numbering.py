"""Which numbering of a model's neurons a run uses: the one that a profile made for such nodes, or the model's own."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from master.deployment.planner import Split, deal_shards, units_of
from tpi.errors import ModelError, TpiError
from tpi.pack.library.numbered import made_from, numbered_packs, open_numbered
from tpi.pack.reader import Pack
from tpi.partition import FFN_UNIT
from tpi.progress import warn
from tpi.sparsity.files import NAME as PREDICTORS
from tpi.sparsity.files import load_predictors
from tpi.sparsity.renumber import NAME, inverse, load_orders, unevenness
from tpi.sparsity.usage import NAME as PROFILE
from tpi.sparsity.usage import load_use

_WORSE = 0.05  # of the busiest node's neurons: so much more than with the model's own numbers is no matter


def numbered_for(sparsity: str, pack: Pack, shares: Sequence[float] | Split, cache: Path) -> Pack:
    """`pack`, or the renumbered pack inside it whose neurons are dealt the most evenly to nodes of these shares.

    The model's own numbers are used where nothing is predicted, and where a node would have many more active neurons
    than with them, since every renumbered pack is for other nodes. One that cannot be used ends no run.

    Raises:
        PlanError: if the model cannot be shared out so.
    """
    made = numbered_packs(pack.path) if (pack.path / PREDICTORS).exists() else []
    if sparsity == "off" or not made:
        return pack
    shards = deal_shards(pack.config, units_of(pack), shares)
    parts = [shard.ffn.scaled(FFN_UNIT, pack.config.intermediate) for shard in shards]
    bounds = [(part.first, part.last) for part in parts]
    ranked = sorted((more, path) for path in made if (more := _more_uneven(pack.path, path, bounds)) is not None)
    for more, path in ranked:
        if more <= _WORSE and (opened := _opened(pack, path, cache)) is not None:
            return opened
    split = "" if len(bounds) == 1 else f" with --split {_words(shares)}"
    warn(f"neurons have the model's own numbers, as none were made for these nodes; tpi profile{split} makes them")
    return pack


def _opened(pack: Pack, path: Path, cache: Path) -> Pack | None:
    """A renumbered pack, or a sentence on what is damaged in it."""
    try:
        if not load_predictors(path / PREDICTORS):
            raise ModelError(f"{PREDICTORS} is missing there; tpi profile makes it again")
        return open_numbered(pack, path, cache)
    except TpiError as error:
        warn(f"{path.name} is not used: {error}")
        return None


def _more_uneven(pack: Path, path: Path, bounds: Sequence[tuple[int, int]]) -> float | None:
    """By how much of its fair part the busiest node is busier with these numbers than with those of `pack`.

    None, said in a sentence, where they cannot be used: they are damaged, or of other predictors than `pack` has now.
    """
    try:
        counts, (orders, of) = load_use(path / PROFILE).counts, load_orders(path / NAME)
    except TpiError as error:
        warn(f"{path.name} is not used: {error}")
        return None
    if of != made_from(pack, orders):
        warn(f"{path.name} is not used: it is of other predictors than the model has now; tpi profile makes it again")
        return None
    own = [row[inverse(order)] for row, order in zip(counts, orders, strict=True)]
    return unevenness(counts, bounds) - unevenness(np.stack(own), bounds)


def _words(shares: Sequence[float] | Split) -> str:
    return ",".join(f"{share:g}" for share in Split.of(shares).ffn)

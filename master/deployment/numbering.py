"""The choice of the order of neurons for a run: an order that `tpi profile` made for its nodes, or the model's own."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from master.deployment.planner import Split, deal_shards, units_of
from tpi.errors import ModelError, TpiError
from tpi.pack.reader import Pack
from tpi.partition import FFN_UNIT
from tpi.progress import warn
from tpi.sparsity.files import NAME as PREDICTORS
from tpi.sparsity.files import load_predictors
from tpi.sparsity.numbered import inputs_hash, numbered_packs, open_numbered
from tpi.sparsity.renumber import NAME, inverse, load_imbalance, load_orders
from tpi.sparsity.usage import NAME as PROFILE
from tpi.sparsity.usage import load_profile

_WORSE = 0.05  # accepted part of extra active neurons on the busiest node, compared with the model's own numbers


def numbered_for(sparsity: str, pack: Pack, shares: Sequence[float] | Split, cache: Path) -> Pack:
    """Return `pack`, or the renumbered pack inside it that spreads active neurons most evenly over the nodes.

    Use the model's own numbers if nothing is predicted, or if every renumbered pack was made for other nodes, so that a
    node would have many more active neurons. A pack that cannot be used is skipped with a warning.

    Raises:
        PlanError: if the model cannot be split by `shares`.
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
    warn(f"neurons keep the model's own order, as no other was made for these nodes; tpi profile{split} makes one")
    return pack


def _opened(pack: Pack, path: Path, cache: Path) -> Pack | None:
    try:
        if not load_predictors(path / PREDICTORS):
            raise ModelError(f"{PREDICTORS} is missing; make it again with tpi profile")
        return open_numbered(pack, path, cache)
    except TpiError as error:
        warn(f"{path.name} is not used: {error}")
        return None


def _more_uneven(pack: Path, path: Path, bounds: Sequence[tuple[int, int]]) -> float | None:
    """Return by how much the busiest node's load grows if neurons are in the order of `path` instead of `pack`.

    The load is 1 if every node has active neurons in proportion to all its neurons (`load_imbalance`). `bounds` are
    each node's neurons `[first, last)`. If the order is damaged, or made from other predictors than `pack` has now,
    warn and return None.
    """
    try:
        counts, (orders, of) = load_profile(path / PROFILE).counts, load_orders(path / NAME)
    except TpiError as error:
        warn(f"{path.name} is not used: {error}")
        return None
    if of != inputs_hash(pack, orders):
        warn(f"{path.name} is not used: the model's predictors have changed since; make it again with tpi profile")
        return None
    own = [row[inverse(order)] for row, order in zip(counts, orders, strict=True)]
    return load_imbalance(counts, bounds) - load_imbalance(np.stack(own), bounds)


def _words(shares: Sequence[float] | Split) -> str:
    return ",".join(f"{share:g}" for share in Split.of(shares).ffn)

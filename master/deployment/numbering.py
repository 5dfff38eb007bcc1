"""Which numbering of a model's neurons a run uses: the one that a profile made for such nodes, or the model's own."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from master.deployment.planner import Split, deal_shards, units_of
from tpi.errors import TpiError
from tpi.pack.library.numbered import numbered_packs, open_numbered
from tpi.pack.reader import Pack
from tpi.partition import FFN_UNIT
from tpi.progress import warn
from tpi.sparsity.files import NAME as PREDICTORS
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
    made = [path for path in numbered_packs(pack.path) if (path / PREDICTORS).exists()]
    if sparsity == "off" or not made:
        return pack
    shards = deal_shards(pack.config, units_of(pack), shares)
    parts = [shard.ffn.scaled(FFN_UNIT, pack.config.intermediate) for shard in shards]
    bounds = [(part.first, part.last) for part in parts]
    try:
        more, best = min((_more_uneven(path, bounds), path) for path in made)
        if more <= _WORSE:
            return open_numbered(pack, best, cache)
    except TpiError as error:
        warn(f"neurons have the model's own numbers: {error}")
        return pack
    split = "" if len(bounds) == 1 else f" with --split {_words(shares)}"
    warn(f"neurons have the model's own numbers, as none were made for these nodes; tpi profile{split} makes them")
    return pack


def _more_uneven(path: Path, bounds: Sequence[tuple[int, int]]) -> float:
    """By how much of its fair part the busiest node is busier with this pack's numbers than with the model's own."""
    counts = load_use(path / PROFILE).counts
    own = [row[inverse(order)] for row, order in zip(counts, load_orders(path / NAME)[0], strict=True)]
    return unevenness(counts, bounds) - unevenness(np.stack(own), bounds)


def _words(shares: Sequence[float] | Split) -> str:
    return ",".join(f"{share:g}" for share in Split.of(shares).ffn)

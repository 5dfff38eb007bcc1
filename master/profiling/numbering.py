"""The renumbered pack that a profile writes, as a whole, with its predictors and profile in the new numbers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from master.deployment.planner import deal_shards, units_of
from tpi.errors import ModelError, WeightsError
from tpi.pack.builder.renumber import write_renumbered
from tpi.pack.builder.repair import find_damage, record_new_pack
from tpi.pack.library.hold import in_use
from tpi.pack.library.record import PackRecord
from tpi.pack.library.store import build
from tpi.pack.reader import Pack, is_pack
from tpi.partition import FFN_UNIT
from tpi.progress import Progress, phase
from tpi.sparsity import files, usage
from tpi.sparsity.numbered import inputs_hash, numbered_path
from tpi.sparsity.predictor import Predictor
from tpi.sparsity.renumber import (
    I32,
    NAME,
    load_orders,
    renumber,
    renumbered_predictor,
    renumbered_profile,
    runs_of_active,
    save_orders,
)


@dataclass(frozen=True, eq=False)
class Numbering:
    """New numbers for the neurons of `pack`, chosen by the profile `use` for nodes with `shares`."""

    pack: Pack
    use: usage.NeuronProfile
    shares: Sequence[float]
    orders: Sequence[I32]

    @classmethod
    def of(cls, pack: Pack, use: usage.NeuronProfile, shares: Sequence[float]) -> "Numbering":
        """Choose the new numbers.

        Raises:
            PlanError: if the model has too few neurons for the nodes.
        """
        shards = deal_shards(pack.config, units_of(pack), shares)
        parts = [len(shard.ffn.scaled(FFN_UNIT, use.neurons)) for shard in shards]
        orders = [renumber(use.frequency[at], use.active(at), parts) for at in range(use.layers)]
        return cls(pack, use, shares, orders)

    @property
    def path(self) -> Path:
        """The directory of the renumbered pack."""
        return numbered_path(self.pack.path, self.shares)

    def keep(self, cache: Path, progress: Progress) -> None:
        """Write the renumbered pack with its predictors and profile, atomically, unless it exists already.

        Raises:
            WeightsError: if the disk is full or cannot be written, or a running process uses an older pack with the
                same path.
            ModelError: if the predictors next to the pack are damaged.
        """
        predictors = files.load_predictors(self.pack.path / files.NAME)
        of = inputs_hash(self.pack.path, np.stack(self.orders))
        if self._is_there(cache, of, predictors.keys()):
            return
        if in_use(self.path):
            raise WeightsError(f"{self.path} is in use by a running process; end it, and profile the model again")
        build(self.path, lambda directory: self._fill(directory, predictors, of, progress), is_pack, overwrite=True)
        record_new_pack(PackRecord(cache, self.path.absolute()))

    def figures(self) -> dict[str, Any]:
        """Return figures for `--json`, mainly the mean number of ranges that a token's active neurons form in a layer.

        A range is a run of consecutive numbers; the figure is given for the model's numbers and for the new ones.
        """
        before, after = runs_of_active(self.use), runs_of_active(self.use, self.orders)
        return {"path": str(self.path), "shares": list(self.shares), "runs": {"before": before, "after": after}}

    def _fill(self, directory: Path, predictors: dict[int, Predictor], of: str, progress: Progress) -> None:
        write_renumbered(self.pack, self.orders, directory, progress)
        usage.save_profile(directory / usage.NAME, renumbered_profile(self.use, self.orders))
        if predictors:
            turned = [renumbered_predictor(one, self.orders[layer]) for layer, one in predictors.items()]
            files.save_predictors(directory / files.NAME, turned, "renumbered")
        save_orders(directory / NAME, self.orders, of)

    def _is_there(self, cache: Path, of: str, layers: Collection[int]) -> bool:
        """Return True if the renumbered pack exists, is complete, and has predictors of exactly the given `layers`."""
        try:
            kept = load_orders(self.path / NAME)[1]
            usage.load_profile(self.path / usage.NAME)
            predicted = files.load_predictors(self.path / files.NAME).keys()
        except ModelError:
            return False
        whole = kept == of and predicted == set(layers)
        return whole and not find_damage(PackRecord.load(cache, self.path), phase).reason


def numbering_line(found: dict[str, Any]) -> str:
    """Return a sentence for the user that describes the renumbering."""
    nodes = len(found["shares"])
    whose = "one node" if nodes == 1 else f"{nodes} nodes"
    runs = found["runs"]
    return (
        f"neurons are renumbered for {whose}: a token's active neurons form {runs['after']:.1f} ranges "
        f"in a layer, and {runs['before']:.1f} before; stored in {found['path']}"
    )

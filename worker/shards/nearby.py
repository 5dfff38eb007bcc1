"""Packs that this machine has anyway, for example on a stick: units come from them rather than over the network.

They are found by what they hold, and each unit is compared with its hash: a pack of another model, or a damaged one,
is no help and no harm.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tpi.errors import TpiError, UsageError
from worker.shards.image import StoredUnits

if TYPE_CHECKING:
    from tpi.pack.reader import PackBlock

log = logging.getLogger(__name__)


class NearbyPacks:
    """The packs in a directory: itself, or those below it."""

    def __init__(self, directory: Path) -> None:
        """Raises UsageError if there is none."""
        self._blocks: dict[str, tuple[Path, Sequence[StoredUnits]]] = {}
        for pack in (directory, *sorted(directory.glob("*")), *sorted(directory.glob("packs/*"))):
            if (pack / "manifest.json").is_file():
                self._read(pack)
        if not self._blocks:
            raise UsageError(f"--model-dir {directory} holds no pack; make one there with tpi pack")

    def stored(self, block: str) -> tuple[Path, Sequence[StoredUnits]] | None:
        """The file that has the block of this id (64 hex digits), and where each run is in it."""
        return self._blocks.get(block)

    def _read(self, directory: Path) -> None:
        from tpi.pack.reader import Pack

        try:
            pack = Pack.open(directory)
            self._blocks.update({block.id: (block.path, list(_units(block))) for block in pack.walk()})
        except TpiError as error:
            log.warning("the pack in %s is not used: %s", directory, error)


def _units(block: "PackBlock") -> Iterator[StoredUnits]:
    for run in block.shape.runs:
        yield StoredUnits(run.name, 0, run.units, block.extent(run.name).offset, run.unit_bytes)

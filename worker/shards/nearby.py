"""Packs on this machine, for example on a USB stick, whose units need not be sent over the network.

Their blocks are found by content, and each unit is checked against its hash. So a pack of another model, or a damaged
one, does no harm.
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
    """The packs in a directory: the directory itself if it is a pack, and packs below it."""

    def __init__(self, directory: Path) -> None:
        """Find the packs.

        Raises:
            UsageError: if the directory holds no pack.
        """
        self._blocks: dict[str, tuple[Path, Sequence[StoredUnits]]] = {}
        for pack in (directory, *sorted(directory.glob("*")), *sorted(directory.glob("packs/*"))):
            if (pack / "manifest.json").is_file():
                self._read(pack)
        if not self._blocks:
            raise UsageError(f"--model-dir {directory} holds no pack; make one there with tpi pack")

    def stored(self, block: str) -> tuple[Path, Sequence[StoredUnits]] | None:
        """Return the file that has the block with this id (64 hex digits) and its runs; None if there is none."""
        return self._blocks.get(block)

    def _read(self, directory: Path) -> None:
        from tpi.pack.reader import Pack

        try:
            pack = Pack.open(directory)
            self._blocks.update({block.id: (block.path, list(_units(block))) for block in pack.walk()})
        except TpiError as error:
            log.warning("ignoring the pack in %s: %s", directory, error)


def _units(block: "PackBlock") -> Iterator[StoredUnits]:
    for run in block.shape.runs:
        yield StoredUnits(run.name, 0, run.units, block.offset(run.name), run.unit_bytes)

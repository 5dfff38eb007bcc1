"""Packs with renumbered neurons, which a profile leaves inside the pack that it is of: `numbered-1`, `numbered-3-2-1`.

The name says for which shares of nodes the hot neurons were dealt. Such a directory is a pack by itself: its
predictors and its profile are in its own numbers, and what is no feed-forward network is a link to the pack around it.
"""

from collections.abc import Sequence
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from weakref import finalize

from tpi.errors import WeightsError
from tpi.pack.library.hold import Hold
from tpi.pack.library.record import PackRecord
from tpi.pack.manifest import MANIFEST
from tpi.pack.reader import Pack, is_pack
from tpi.progress import Phase, phase
from tpi.sparsity.files import NAME as PREDICTORS
from tpi.sparsity.renumber import I32

_PREFIX = "numbered-"


def numbered_path(pack: Path, shares: Sequence[float]) -> Path:
    """Where the pack with neurons numbered for nodes of these shares is, or would be."""
    return pack / (_PREFIX + "-".join(f"{share:g}" for share in shares))


def numbered_packs(pack: Path) -> list[Path]:
    """The renumbered packs inside a pack, in the order of their names."""
    return sorted(path for path in pack.glob(f"{_PREFIX}*") if is_pack(path))


def made_from(pack: Path, orders: I32) -> str:
    """What names the pack, its predictors and the orders, `[layers, neurons]`, that a renumbered pack is made from."""
    predictors = pack / PREDICTORS
    parts = [(pack / MANIFEST).read_bytes(), predictors.read_bytes() if predictors.exists() else b""]
    return sha256(b"".join([*parts, orders.tobytes()])).hexdigest()


def open_numbered(pack: Pack, path: Path, cache: Path, progress: Phase = phase) -> Pack:
    """The renumbered pack `path` of `pack`, which nobody removes or replaces while it lives.

    Raises:
        WeightsError: if it is damaged; it says how it is made again.
        ModelError: if its manifest cannot be used.
    """
    from tpi.pack.builder.mend import find_damage

    with closing(Hold(path)):
        record = PackRecord.load(cache, path)
        known, damage = dict(record.checked), find_damage(record, progress)
        if damage.reason:
            raise WeightsError(f"{damage.files}; have it made again with tpi profile, as it was made")
        if record.checked != known:
            record.save()
        found = Pack.open(path)
        finalize(found, _let_go, Hold(path), pack)
    return found


def _let_go(hold: Hold, around: Pack) -> None:
    """The pack around it lives as long."""
    del around
    hold.close()

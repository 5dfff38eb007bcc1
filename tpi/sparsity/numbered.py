"""Packs with renumbered neurons. `tpi profile` writes them inside the profiled pack: `numbered-1`, `numbered-3-2-1`.

The numbers in the name are the shares of the nodes among which the hot neurons are divided. Such a directory is a
complete pack. Its predictors and profile use its own numbering. Files other than feed-forward blocks are links to the
outer pack.
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
    """Return the directory for the pack whose neurons are numbered for nodes with these shares. It need not exist."""
    return pack / (_PREFIX + "-".join(f"{share:g}" for share in shares))


def numbered_packs(pack: Path) -> list[Path]:
    """Return the renumbered packs inside a pack, in the order of their names."""
    return sorted(path for path in pack.glob(f"{_PREFIX}*") if is_pack(path))


def inputs_hash(pack: Path, orders: I32) -> str:
    """Return a hash of the inputs of a renumbered pack: the pack's manifest, its predictors, and the orders of neurons.

    `orders` is int32 `[layers, neurons]`.
    """
    predictors = pack / PREDICTORS
    parts = [(pack / MANIFEST).read_bytes(), predictors.read_bytes() if predictors.exists() else b""]
    return sha256(b"".join([*parts, orders.tobytes()])).hexdigest()


def open_numbered(pack: Pack, path: Path, cache: Path, progress: Phase = phase) -> Pack:
    """Open the renumbered pack in the directory `path` inside `pack`.

    The directory is not removed or replaced while the returned object exists.

    Raises:
        WeightsError: if the pack is damaged; the message says how to make it again.
        ModelError: if its manifest cannot be used.
    """
    from tpi.pack.builder.repair import find_damage

    with closing(Hold(path)):
        record = PackRecord.load(cache, path)
        known, damage = dict(record.checked), find_damage(record, progress)
        if damage.reason:
            raise WeightsError(f"{damage.files}; make it again with tpi profile and the same options")
        if record.checked != known:
            record.save()
        found = Pack.open(path)
        finalize(found, _let_go, Hold(path), pack)
    return found


def _let_go(hold: Hold, around: Pack) -> None:
    """Release the lock `hold`. Passing `around` keeps the outer pack alive until then."""
    del around
    hold.close()

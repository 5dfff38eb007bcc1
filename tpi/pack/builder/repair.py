"""Detection and repair of damaged packs.

Files whose size or times have changed since the last check are compared with their hashes. Damaged files are made again
from the source, with one line on stderr. If the source is gone, the error says what to do.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from tpi.errors import TpiError, WeightsError
from tpi.pack.library.record import PackRecord, stamp
from tpi.pack.manifest import MANIFEST, Manifest
from tpi.pack.reader import Pack, PackBlock
from tpi.progress import Phase

TOKENIZER = "tokenizer.json"
Identity = Callable[[Path, str], str]  # (source, dtype) to a hash, see `tpi.pack.library.locate.identity`


@dataclass
class Damage:
    """Parts of a pack that must be made again: blocks by id, and the tokenizer. All parts if `manifest` is None."""

    manifest: Manifest | None
    reason: str = ""  # description of the first damaged file; empty if the pack is intact
    blocks: list[str] = field(default_factory=list)
    tokenizer: bool = False

    @property
    def files(self) -> str:
        """Description of the damage: the first damaged file, and the number of others."""
        count = len(self.blocks) + self.tokenizer
        more = f" (and {count - 1} more)" if self.manifest and count > 1 else ""
        return self.reason + more


def open_repaired(record: PackRecord, identity: Identity, progress: Phase) -> Pack:
    """Open the pack of `record`. Files that are damaged, truncated or missing are made again first.

    `identity` returns the hash of a source, which tells whether the source has changed.

    Raises:
        WeightsError: if the pack is damaged and its source is gone or has changed, or the disk is full.
        ModelError: if the source cannot be read.
    """
    known = dict(record.checked)
    damage = find_damage(record, progress)
    if damage.reason:
        source = _source(record, damage, identity)
        sys.stderr.write(f"tpi: {damage.files}; making it again from {source}\n")
        _make_again(record, damage, source, progress)
    if record.checked != known:
        record.save()
    return Pack.open(record.pack)


def find_damage(record: PackRecord, progress: Phase) -> Damage:
    """Check the files of a pack. Only files that are new or have changed are compared with their hashes.

    Files that turn out to be intact are added to `record`, which is not saved.
    """
    try:
        manifest = Manifest.load(record.pack / MANIFEST)
    except TpiError as error:
        return Damage(None, str(error).rpartition(";")[0] or str(error))
    if not _same(record, MANIFEST):
        return Damage(None, f"{record.pack / MANIFEST} is damaged")
    damage = Damage(manifest)
    if manifest.tokenizer and not _same(record, TOKENIZER):
        damage.tokenizer = True
        damage.reason = _words(record.pack / TOKENIZER)
    doubted = [
        block for block in Pack(record.pack, manifest).blocks.values() if not record.is_unchanged(block.path.name)
    ]
    if doubted:
        with progress(f"checking {record.pack.name}") as report:
            _check(record, doubted, damage, report)
    return damage


def record_new_pack(record: PackRecord) -> None:
    """Record all files of a pack that has just been made as intact, and save the record."""
    names = [path.name for path in record.pack.glob("*.safetensors")]
    record.checked, record.digests = {}, {}
    record.mark_intact([*names, MANIFEST, TOKENIZER])
    for name in (MANIFEST, TOKENIZER):
        if digest := _digest(record.pack / name):
            record.digests[name] = digest
    record.save()


def _check(record: PackRecord, blocks: Sequence[PackBlock], damage: Damage, report: Callable[[int, int], None]) -> None:
    total, done = sum(block.shape.nbytes for block in blocks), 0
    for block in blocks:
        found = stamp(block.path)
        try:
            block.verify()
        except WeightsError:
            damage.blocks.append(block.id)
            damage.reason = damage.reason or _words(block.path)
        else:
            assert found
            record.checked[block.path.name] = found
        report(done := done + block.shape.nbytes, total)


def _same(record: PackRecord, name: str) -> bool:
    """Return True if the file `name`, which has no hashes, has not changed since the pack was made.

    Without a record from then, the file is compared with its state when this machine first saw it.
    """
    if record.is_unchanged(name):
        return True
    found, digest = stamp(record.pack / name), _digest(record.pack / name)
    if not found or not digest or record.digests.setdefault(name, digest) != digest:
        return False
    record.checked[name] = found
    return True


def _digest(path: Path) -> str | None:
    try:
        return sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _words(path: Path) -> str:
    return f"{path} is {'damaged' if path.exists() else 'missing'}"


def _source(record: PackRecord, damage: Damage, identity: Identity) -> Path:
    """Return the path of the model that the pack was made from.

    Raises:
        WeightsError: if it is not known, is gone, or has changed. The message says which command makes the pack again.
    """
    source = Path(record.source)
    way_out = f"delete {record.pack} and make it again with: tpi pack {record.source or 'MODEL'} -o {record.pack}"
    way_out += f" --dtype {record.dtype or (damage.manifest.dtype if damage.manifest else 'DTYPE')}"
    if not record.source:
        raise WeightsError(f"{damage.files}, and the source of the pack is not known on this machine; {way_out}")
    if not source.exists():
        raise WeightsError(f"{damage.files}, and its source {source} is gone; restore the source, or {way_out}")
    if identity(source, record.dtype) != record.identity:
        raise WeightsError(f"{damage.files}, and its source {source} has changed since; {way_out}")
    return source


def _make_again(record: PackRecord, damage: Damage, source: Path, progress: Phase) -> None:
    from tpi.pack.builder.build import open_source, pack_model, repair_pack

    mended = damage.manifest is not None and repair_pack(
        open_source(source), record.dtype, record.pack, damage.manifest, damage.blocks, damage.tokenizer, progress
    )
    if not mended:
        pack_model(open_source(source), record.dtype, record.pack, progress, overwrite=True)
    record_new_pack(record)

"""The shard cache of a worker or of the master: the images that a node has on disk.

    <root>/<block id>/<ranges>.shard        a complete image, checked when written; never changed, only removed
    <root>/<block id>/<ranges>.part         a partial image; its hashes show which units it has, there is no journal
    <root>/<block id>/<ranges>.used         touched when the image is used
    <root>/checked.json                     sizes, times and hashes of the images that were checked before

Several processes may share a root (`worker.shards.uses`). One of them can resume its partial images after a restart;
the others use private names. Partial images that no process fills are removed when the next plan is complete. Images
over the limit are removed, least recently used first.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tpi.cachelimit import CacheLimit
from tpi.errors import WeightsError
from tpi.progress import Progress, silent
from tpi.system.fulldisk import is_full, write_error
from tpi.system.machine import disk_free
from tpi.system.openfiles import way_to_write
from tpi.system.private import FILE, make_private, private
from worker.node_plan import NodeBlock
from worker.shards.image import (
    HeldBlock,
    Piece,
    image_bytes,
    image_name,
    image_pieces,
    image_token,
    open_image,
    stored_units,
)
from worker.shards.nearby import NearbyPacks
from worker.shards.partial_image import PartialImage, bad_pieces, out_of_disk
from worker.shards.stored import StoredImage, key_of, mark_used, remove_least_recent, stored_images
from worker.shards.uses import Uses, change_lock

_CACHE_WAY = "set TPI_CACHE, or --cache, to a directory that can be written"
_KEEP_OTHERS = 1  # other images of a block that stay, so that a return to the last split needs no transfer


class ShardCache:
    """The shard images in one directory. It is opened for one plan after the other."""

    def __init__(self, root: Path, limit: CacheLimit | None = None, nearby: NearbyPacks | None = None) -> None:
        """Open or create the cache.

        Args:
            root: the directory.
            limit: limits the size of the cache. None: no limit, because another process limits the size.
            nearby: packs from which missing units are copied.

        Raises:
            WeightsError: if the directory cannot be created.
        """
        self.root = root
        self.completed = 0  # number of images completed since the cache was opened
        self._limit = limit
        self._nearby = nearby
        self._model = ""
        with self._usable():
            make_private(root)
            self._uses = Uses(root)
            self._writer = os.open(root / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE)
        self._suffix = ".part" if _try_lock(self._writer) else f".{os.getpid()}.part"
        self._checked = _load(root / "checked.json")
        self._saved = dict(self._checked)

    def open(
        self, blocks: Sequence[NodeBlock], progress: Progress = silent, model: str = ""
    ) -> dict[bytes, HeldBlock | PartialImage]:
        """Return the image of each of `blocks`, by the block's id: complete, or partial with the units found here.

        Units are looked for in other images of the cache and in the packs given as `nearby`. No process removes these
        images until `release`, `close` or the next `open`.

        Args:
            blocks: the blocks of the plan.
            progress: called with the number of blocks done and of all blocks; may raise to cancel.
            model: the name that `tpi ls` shows for new images.

        Raises:
            WeightsError: if the missing images do not fit on the disk, or if the plan is over the limit.
        """
        found: dict[bytes, HeldBlock | PartialImage] = {}
        total, self._model = len(blocks), model
        self._within_limit(blocks)
        with self._usable():
            self._uses.declare(key_of(self._path(block)) for block in blocks)
            self._require_space(blocks)
            for done, block in enumerate(blocks):
                progress(done, total)
                if block.id not in found:
                    found[block.id] = self._complete(block) or self._partial(block)
        self._save()
        return found

    def finish(self, partial: PartialImage) -> HeldBlock:
        """Turn a partial image that lacks no units into a complete image, and sync it to the disk.

        Raises:
            WeightsError: if the disk is full or failing.
        """
        path = self._path(partial.block)
        partial.publish(path)
        self.completed += 1
        mark_used(path, self._model)
        self._remember(partial.block, path)
        return open_image(partial.block, path)

    def is_intact(self, path: Path, pieces: Sequence[Piece], token: str) -> bool:
        """Return True if `pieces` of the file at `path` match their hashes. The file may lie outside of the cache.

        Success is remembered until the file changes, so that the next call with the same `token`, which identifies the
        hashes, does not read the file.
        """
        key, stamp = f"{path.absolute()}#{token}", _stamp(path, token)
        if stamp is None or self._checked.get(key) == stamp:
            return stamp is not None
        if bad_pieces(path, pieces):
            return False
        self._checked[key] = stamp
        return True

    def prune(self, blocks: Sequence[NodeBlock]) -> None:
        """Remove partial images that no process fills, and images of `blocks` with other ranges.

        Call it when `blocks` are complete. Of each block, the latest image with other ranges stays, for a return to the
        last split. Images that other processes use stay too.
        """
        with self._usable(), change_lock(self.root):
            spare = self._spare(blocks)
            gone = [image for image in spare if image.partial]
            for block in blocks:
                others = [image for image in spare if not image.partial and image.path.parent.name == block.id.hex()]
                gone += sorted(others, key=lambda image: image.last_used)[: -_KEEP_OTHERS or None]
            for image in gone:
                image.remove()
        self._forget(gone)
        self._save()

    def release(self) -> None:
        """Declare that this process uses no image any more."""
        with contextlib.suppress(OSError):
            self._uses.declare(())

    def close(self) -> None:
        """Save the list of checked images, and release the locks."""
        self._save()
        self._uses.close()
        os.close(self._writer)

    def _complete(self, block: NodeBlock) -> HeldBlock | None:
        """Return the image of `block` if it exists and is sound.

        A damaged image becomes a partial one, and None is returned.
        """
        path = self._path(block)
        stamp = _stamp(path, image_token(block))
        if stamp is None:
            return None
        if self._checked.get(self._key(path)) != stamp:
            if bad_pieces(path, image_pieces(block)) or path.stat().st_size != image_bytes(block):
                path.rename(self._partial_path(block))
                return None
            self._remember(block, path)
        mark_used(path, self._model)
        return open_image(block, path)

    def _partial(self, block: NodeBlock) -> PartialImage:
        path = self._partial_path(block)
        make_private(path.parent)
        partial = PartialImage(block, path)
        for sibling in self._siblings(block):
            if not partial.missing:
                break
            partial.copy_from(sibling, stored_units(sibling))
        if partial.missing and self._nearby and (found := self._nearby.stored(block.id.hex())):
            partial.copy_from(*found)
        return partial

    def _siblings(self, block: NodeBlock) -> Iterator[Path]:
        return (self.root / block.id.hex()).glob("*.shard")

    def _path(self, block: NodeBlock) -> Path:
        return self.root / block.id.hex() / image_name(block)

    def _partial_path(self, block: NodeBlock) -> Path:
        return self._path(block).with_suffix(self._suffix)

    def _key(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _exists(self, key: str) -> bool:
        """Return True if the file that a key of `checked.json` names exists.

        A key is a path below the root, or an absolute path, "#" and a token.
        """
        return (self.root / key.partition("#")[0]).exists()

    def _remember(self, block: NodeBlock, path: Path) -> None:
        stamp = _stamp(path, image_token(block))
        if stamp is not None:
            self._checked[self._key(path)] = stamp

    def _spare(self, blocks: Sequence[NodeBlock]) -> list[StoredImage]:
        """Return the images and partial images that neither `blocks` nor other processes use.

        The caller must hold `change_lock`.
        """
        used = self._uses.others()
        own = {path for block in blocks for path in (self._path(block), self._partial_path(block))}
        return [image for image in stored_images(self.root, but=own) if image.key not in used]

    def _forget(self, gone: Iterable[StoredImage]) -> None:
        for image in gone:
            self._checked.pop(self._key(image.path), None)

    def _within_limit(self, blocks: Sequence[NodeBlock]) -> None:
        most = self._limit.nbytes if self._limit else None
        if most is not None and (needed := _total(blocks)) > most:
            raise WeightsError(
                f"the shards of this plan need {-(-needed >> 20)} MiB, but {self.root} is limited to {most >> 20} MiB; "
                "raise --cache-limit on this node, or give it a smaller share with --split"
            )

    def _require_space(self, blocks: Sequence[NodeBlock]) -> None:
        """Remove unused images until the missing images of `blocks` fit within the limit of the cache.

        Raises:
            WeightsError: if the disk then still has too little free space for the missing images.
        """
        needed = _total(block for block in blocks if not self._path(block).exists())
        needed -= sum(_allocated(self._partial_path(block)) for block in blocks)
        if needed <= 0 and (self._limit is None or self._limit.nbytes is None):
            return
        with change_lock(self.root):
            held = sum(image.nbytes for image in stored_images(self.root))
            limit = self._limit or CacheLimit(held + needed)
            self._forget(remove_least_recent(self._spare(blocks), limit.excess(self.root, held, needed)))
            free = disk_free(self.root)
        if needed > free:
            raise out_of_disk(self.root, needed, free)

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if is_full(error):
                raise write_error(
                    self.root, error, "free some space, or set TPI_CACHE, or --cache, to another directory"
                ) from error
            reason = error.strerror or error
            raise WeightsError(
                f"cannot use {self.root} as a cache: {reason}; {way_to_write(error, _CACHE_WAY)}"
            ) from error

    def _save(self) -> None:
        """Save the list of checked images if it has changed, without images whose files are gone."""
        if self._checked == self._saved:
            return
        self._checked = {key: stamp for key, stamp in self._checked.items() if self._exists(key)}
        temporary = self.root / f"checked.{os.getpid()}.tmp"
        try:
            with open(temporary, "w", opener=private) as file:
                json.dump(self._checked, file)
            temporary.replace(self.root / "checked.json")
            self._saved = dict(self._checked)
        except OSError:  # the images are checked again at the next start
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _stamp(path: Path, token: str) -> list[int | str] | None:
    """Return a value that changes when the file or `token` changes; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, token]


def _total(blocks: Iterable[NodeBlock]) -> int:
    return sum({block.id: image_bytes(block) for block in blocks}.values())


def _allocated(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _load(path: Path) -> dict[str, list[int | str]]:
    try:
        known = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}

"""The files of a shard cache: images and partial images, their sizes, and the times of their last use."""

import os
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tpi.system.private import private

_STAMP = ".used"  # a file next to each image: touched when the image is used; contains the model's name


@dataclass(frozen=True)
class StoredImage:
    """One file of a shard cache: an image, or a partial one."""

    path: Path
    nbytes: int  # allocated by the file system
    last_used: float  # seconds since 1970
    model: str  # the model's name; empty if unknown

    @property
    def key(self) -> str:
        """Key of the image, `<block id>/<ranges>`: the same for an image and a partial image."""
        return key_of(self.path)

    @property
    def partial(self) -> bool:
        """True if some units of the image are missing."""
        return self.path.suffix == ".part"

    def remove(self) -> None:
        """Delete the file, and the directory of its block if that is empty."""
        self.path.unlink(missing_ok=True)
        if not self.partial:
            self.path.with_suffix(_STAMP).unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            self.path.parent.rmdir()


def key_of(path: Path) -> str:
    """Return the key `<block id>/<ranges>` of an image or a partial image.

    The names of partial images are `<ranges>.part` or `<ranges>.<process>.part`.
    """
    name = path.name.removesuffix(".part").removesuffix(".shard")
    begin, _, process = name.rpartition(".")
    own = path.suffix == ".part" and process.isdecimal() and "-" in begin
    return f"{path.parent.name}/{begin if own else name}"


def stored_images(root: Path, but: Container[Path] = ()) -> Iterator[StoredImage]:
    """Yield every image and partial image below `root`, except those at the paths `but`."""
    for path in root.glob("*/*"):
        if path.suffix in (".shard", ".part") and path not in but:
            with suppress(OSError):  # another process removed it
                yield _stored(path)


def mark_used(path: Path, model: str) -> None:
    """Record that an image is used now, and, at its first use, for which model. Disk errors are ignored."""
    stamp = path.with_suffix(_STAMP)
    with suppress(OSError):
        try:
            os.utime(stamp)
        except FileNotFoundError:
            with open(stamp, "w", opener=private) as file:
                file.write(model)


def remove_least_recent(images: Iterable[StoredImage], excess: int) -> list[StoredImage]:
    """Remove images until `excess` bytes are freed or no image is left; return the removed images.

    Partial images go first, then the least recently used images.
    """
    gone: list[StoredImage] = []
    for image in sorted(images, key=lambda image: (not image.partial, image.last_used)):
        if excess <= 0:
            break
        image.remove()
        excess -= image.nbytes
        gone.append(image)
    return gone


def _stored(path: Path) -> StoredImage:
    found, stamp = path.stat(), path.with_suffix(_STAMP)
    used, model = found.st_mtime, ""
    with suppress(OSError):
        used, model = stamp.stat().st_mtime, stamp.read_text(errors="replace")
    return StoredImage(path, found.st_blocks * 512, used, model)

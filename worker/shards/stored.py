"""What a shard cache holds on its disk: images and partial images, their sizes, and when each was last used."""

import os
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tpi.system.private import private

_STAMP = ".used"  # a file beside each image: touched when it is used, and says of which model it is


@dataclass(frozen=True)
class StoredImage:
    """One file of a shard cache: an image, or a partial one."""

    path: Path
    nbytes: int  # that the file system has given it
    last_used: float  # seconds since 1970
    model: str  # for people; empty if unknown

    @property
    def key(self) -> str:
        """`<block id>/<ranges>`, the same for an image and a partial one."""
        return key_of(self.path)

    @property
    def partial(self) -> bool:
        """Whether it is not complete."""
        return self.path.suffix == ".part"

    def remove(self) -> None:
        """Delete it, and what is left of its block if that was the last one."""
        self.path.unlink(missing_ok=True)
        if not self.partial:
            self.path.with_suffix(_STAMP).unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            self.path.parent.rmdir()


def key_of(path: Path) -> str:
    """`<block id>/<ranges>` of an image, or a partial one: `<ranges>.part`, or `<ranges>.<process>.part`."""
    name = path.name.removesuffix(".part").removesuffix(".shard")
    begin, _, process = name.rpartition(".")
    own = path.suffix == ".part" and process.isdecimal() and "-" in begin
    return f"{path.parent.name}/{begin if own else name}"


def stored_images(root: Path, but: Container[Path] = ()) -> Iterator[StoredImage]:
    """Every image and partial image below `root` but those at some paths."""
    for path in root.glob("*/*"):
        if path.suffix in (".shard", ".part") and path not in but:
            with suppress(OSError):  # somebody else removed it
                yield _stored(path)


def mark_used(path: Path, model: str) -> None:
    """Remember that an image is used now, and by which model first; a disk that cannot be written forgets it."""
    stamp = path.with_suffix(_STAMP)
    with suppress(OSError):
        try:
            os.utime(stamp)
        except FileNotFoundError:
            with open(stamp, "w", opener=private) as file:
                file.write(model)


def remove_least_recent(images: Iterable[StoredImage], excess: int) -> list[StoredImage]:
    """Remove partial images and then the images that were used least recently, until `excess` bytes or all are gone."""
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

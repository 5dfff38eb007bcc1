"""A partial image: a file that is filled with checked pieces in any order, and gets its name when it is complete."""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import groupby
from pathlib import Path

from tpi.errors import WeightsError
from tpi.net.fields import TRANSFER_BYTES
from tpi.net.transfers import Need, UnitData
from tpi.system.fulldisk import is_full
from tpi.system.private import FILE
from worker.node_plan import NodeBlock
from worker.shards.image import Piece, StoredUnits, image_bytes, image_header, image_pieces


def bad_pieces(path: Path, pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces whose bytes in the file at `path` do not match their hashes.

    Raises:
        WeightsError: if the file cannot be read.
    """
    bad = []
    buffer = memoryview(bytearray(max((piece.nbytes for piece in pieces), default=0)))
    try:
        with path.open("rb", buffering=0) as file:
            for piece in pieces:
                view = buffer[: piece.nbytes]
                if not _read_exactly(file.fileno(), view, piece.offset) or sha256(view).digest() != piece.digest:
                    bad.append(piece)
                forget(file.fileno(), piece.offset, piece.nbytes)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}; remove it to fetch it again") from error
    return bad


def forget(descriptor: int, offset: int, size: int) -> None:
    """Drop a range of a file from the page cache, since weights are read with direct I/O.

    A `size` of 0 means up to the end.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)


class PartialImage:
    """The image of a block while pieces are missing."""

    def __init__(self, block: NodeBlock, path: Path) -> None:
        """Resume the partial image at `path`, or create one and reserve space for the whole image.

        Raises:
            WeightsError: if the disk is full; the partial image is then removed.
        """
        self.block = block
        self._nbytes = image_bytes(block)
        self.path = path
        resumed = path.exists()
        with self._disk_errors(), self._opened(os.O_CREAT) as descriptor:
            if os.fstat(descriptor).st_size != self._nbytes:
                os.ftruncate(descriptor, self._nbytes)
            _reserve(descriptor, self._nbytes)
        pieces = image_pieces(block)
        pieces = bad_pieces(path, pieces) if resumed else pieces
        self.missing: dict[tuple[str, int], Piece] = {(piece.run, piece.unit): piece for piece in pieces}

    @property
    def missing_bytes(self) -> int:
        """Bytes of the missing pieces."""
        return sum(piece.nbytes for piece in self.missing.values())

    def copy_from(self, path: Path, stored: Sequence[StoredUnits]) -> None:
        """Copy the missing units that match their hashes from another image of the same block."""
        for run in stored:
            for unit in range(run.first, run.last):
                piece = self.missing.get((run.run, unit))
                if piece is not None and piece.nbytes == run.unit_bytes:
                    self._copy_piece(piece, path, run.offset + (unit - run.first) * run.unit_bytes)

    def needs(self, within: UnitData | None = None) -> Iterator[Need]:
        """Yield requests for the missing units; each requests adjacent units of about `TRANSFER_BYTES` bytes.

        If `within` is an answer of the master, request only units of that answer: those that arrived damaged.
        """
        missing = self.missing
        if within is not None:
            missing = {key: missing[key] for unit in range(within.first, within.last)
                       if (key := (str(within.run), unit)) in missing}  # fmt: skip
        ordered = sorted(missing.values(), key=lambda piece: piece.offset)
        numbered = enumerate(ordered)
        for _, group in groupby(numbered, key=lambda item: (item[1].run, item[1].unit - item[0])):
            pieces = [piece for _, piece in group]
            step = max(1, TRANSFER_BYTES // pieces[0].nbytes)
            for at in range(0, len(pieces), step):
                part = pieces[at : at + step]
                yield Need(self.block.id, part[0].run, part[0].unit, part[-1].unit + 1)

    def size_of(self, need: Need) -> int:
        """Return the number of bytes of the units that `need` requests."""
        return sum(self.missing[need.run, unit].nbytes for unit in range(need.first, need.last))

    def accept(self, units: UnitData) -> int:
        """Write the units of an answer that match their hashes; return how many do not, and so are still missing.

        Raises:
            WeightsError: if the disk is full or failing; the partial image is then removed.
        """
        pieces = [self.missing.get((units.run, unit)) for unit in range(units.first, units.last)]
        size = len(units.data) // max(1, len(pieces))
        good = []
        for index, piece in enumerate(pieces):
            data = units.data[index * size : (index + 1) * size]
            if piece is not None and len(data) == piece.nbytes and sha256(data).digest() == piece.digest:
                good.append((piece, data))
        with self._disk_errors(), self._opened() as descriptor:
            if good and len(good) == len(pieces):  # the units are adjacent in the file too, so one write will do
                _write_all(descriptor, units.data, good[0][0].offset)
            else:
                for piece, data in good:
                    _write_all(descriptor, data, piece.offset)
        for piece, _ in good:
            del self.missing[piece.run, piece.unit]
        return sum(piece is not None for piece in pieces) - len(good)

    def publish(self, path: Path) -> None:
        """Write the header, sync the file to the disk, and rename it to `path`."""
        assert not self.missing
        with self._disk_errors():
            with self._opened() as descriptor:
                _write_all(descriptor, memoryview(image_header(self.block)), 0)
                os.fsync(descriptor)
                forget(descriptor, 0, 0)
            self.path.rename(path)
            _sync_directory(path.parent)

    def _copy_piece(self, piece: Piece, path: Path, offset: int) -> None:
        data = memoryview(bytearray(piece.nbytes))
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            if not _read_exactly(file.fileno(), data, offset):
                return
        if sha256(data).digest() == piece.digest:
            with self._disk_errors(), self._opened() as descriptor:
                _write_all(descriptor, data, piece.offset)
            del self.missing[piece.run, piece.unit]

    @contextlib.contextmanager
    def _opened(self, flags: int = 0) -> Iterator[int]:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | flags, FILE)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.path.unlink(missing_ok=True)
            if is_full(error):
                raise out_of_disk(self.path.parent.parent, self._nbytes) from error
            raise WeightsError(
                f"cannot write {self.path}: {error.strerror}; check the disk, or use another with TPI_CACHE or --cache"
            ) from error


def out_of_disk(root: Path, needed: int, free: int | None = None) -> WeightsError:
    """Return the error for a disk without room for `needed` more bytes of shards; `free` bytes are free, if known."""
    has = "" if free is None else f", {free >> 20} MiB are free"
    return WeightsError(
        f"disk full: {root} needs {-(-needed >> 20)} MiB more for shards{has}; make room "
        "there, or set TPI_CACHE or --cache to another directory"
    )


def _reserve(descriptor: int, size: int) -> None:
    """Reserve space for the file, if the file system supports it, so that a full disk shows now."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV):
            raise


def _read_exactly(descriptor: int, view: memoryview, offset: int) -> bool:
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            return False
        done += count
    return True


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

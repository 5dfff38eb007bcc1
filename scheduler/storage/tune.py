"""Which read size and how many reads in flight a disk likes best: measured once per disk, then remembered."""

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from scheduler.storage.disk import DEFAULT_CHUNK, DEFAULT_THREADS, DirectDisk
from scheduler.storage.extent import Extent
from tpi.devices.pages import PAGE, page_buffer, round_up
from tpi.system.private import make_private, private

CHUNKS = (512 << 10, 1 << 20, 4 << 20, 16 << 20)  # bytes per read
THREADS = (4, 8)  # fewer would leave the disk idle while computing threads keep a reader from its core
_SMALLEST = 256 << 10  # bytes: smaller reads slow every disk down
_LARGE = 4 << 20  # bytes: of reads that are not made smaller for the sake of more than `_AT_ONCE`
_AT_ONCE = 4
_LEAST = 32 << 20  # bytes: with less to read there is nothing to measure
_ROUNDS = 2  # of all candidates, so that what else the machine does spoils none of them; each one's fastest counts
_SAMPLE = 256 << 20  # bytes read per candidate and round at most
_BUFFER = 2 << 20  # bytes: a whole huge page, since reads into a ring go into huge pages
_SECONDS = 0.15  # per candidate and round at most
_GOOD_ENOUGH = 0.85  # of the best speed, for a candidate with larger reads
_FRESH_S = 7 * 24 * 3600.0  # after which a disk is measured again: it fills up, and ages
_TELLING = 256 << 20  # bytes: a run that read less says nothing of the disk
_ODD = 2.0  # times faster or slower than remembered: beside computing a disk gives 0.8 to 1.0 of its speed
_SAME = 1.3  # times faster or slower: the same speed, measured twice


@dataclass(frozen=True)
class DiskSpeed:
    """What was measured of one disk, and how to read it."""

    chunk: int = DEFAULT_CHUNK
    threads: int = DEFAULT_THREADS
    bytes_per_second: float = 0.0  # 0: not measured
    at: float = field(default=0.0, compare=False)  # when it was measured, in seconds since 1970
    doubted: bool = field(default=False, compare=False)  # a run contradicted it since
    confirmed: bool = field(default=False, compare=False)  # measured again after a doubt, it was the same

    @property
    def good(self) -> bool:
        """Whether it may be relied upon: neither old nor doubted."""
        return 0 <= time.time() - self.at < _FRESH_S and not self.doubted

    def contradicted(self, nbytes: int, seconds: float) -> bool:
        """Whether a run that read `nbytes` in `seconds` says otherwise; never of what was confirmed since."""
        if self.confirmed or not self.bytes_per_second or nbytes < _TELLING or seconds <= 0:
            return False
        return not _alike(nbytes / seconds, self.bytes_per_second, _ODD)

    def open(self, block: int = 1 << 30) -> DirectDisk:
        """A disk that reads in about this way: blocks of `block` bytes in equal parts, no more at once than one has.

        Every read that ends must win a core from the threads that compute before the next can begin, so there are many
        at once, but none is made smaller than `_LARGE` for it. With more at once than a block has parts, two blocks
        would share the disk and end together, and it would be idle until the first had been used.
        """
        least = min(max(block // _LARGE, _AT_ONCE), self.threads)
        parts = max(round(block / self.chunk), least)
        return DirectDisk(max(round_up(-(-block // parts)), _SMALLEST), min(self.threads, parts))


def disk_for(files: Sequence[Path], cache: Path) -> DiskSpeed:
    """How to read the disk that `files` are on: remembered in `cache`/disks.json, or measured now in 2.5 s.

    It is remembered for a week, until the next boot, when disks may change their numbers, or until a run contradicts it
    (`doubt`). Too little to read, or files that cannot be read, give the defaults, which are not remembered. Processes
    that share a cache measure one after the other, so that each sees the disk alone, and all but the first remember.
    """
    present = [path for path in files if path.is_file()]
    extents = [Extent(path, 0, path.stat().st_size // PAGE * PAGE) for path in present]
    record = cache / "disks.json"
    with _one_at_a_time(record.with_suffix(".lock")):
        known, key = _load(record), f"{present[0].stat().st_dev} {_boot()}" if present else ""
        if key not in known or not known[key].good:
            if sum(extent.nbytes for extent in extents) < _LEAST:
                return DiskSpeed()
            known = {other: speed for other, speed in known.items() if other.endswith(f" {_boot()}")}
            known[key] = _again(known.get(key), best(extents))
            _save(record, known)
        return known[key]


def known_speed(path: Path, cache: Path) -> float:
    """Bytes per second of the disk that `path` is on, if they are remembered in `cache`/disks.json; else 0."""
    with suppress(OSError):
        found = _load(cache / "disks.json").get(f"{path.stat().st_dev} {_boot()}")
        return found.bytes_per_second if found else 0.0
    return 0.0


def doubt(files: Sequence[Path], cache: Path) -> None:
    """A run contradicted what is remembered of the disk that `files` are on: the next start measures it again."""
    record = cache / "disks.json"
    present = [path for path in files if path.is_file()]
    with _one_at_a_time(record.with_suffix(".lock")):
        known = _load(record)
        key = f"{present[0].stat().st_dev} {_boot()}" if present else ""
        if key in known:
            _save(record, known | {key: replace(known[key], doubted=True)})


def _again(before: DiskSpeed | None, found: DiskSpeed) -> DiskSpeed:
    """What was found just now, beside what was remembered: if that was doubted and is the same, it is confirmed."""
    doubted = before is not None and before.doubted
    same = before is not None and _alike(before.bytes_per_second, found.bytes_per_second, _SAME)
    return replace(found, at=time.time(), confirmed=doubted and same)


def _alike(one: float, other: float, times: float) -> bool:
    return one <= times * other and other <= times * one


def best(extents: Sequence[Extent]) -> DiskSpeed:
    """The fastest candidate; among nearly equal ones that with the most in flight, then the largest reads.

    Here nothing else runs. Later readers compete with the threads that compute: beside them tiles of 33 MiB came 1.1 to
    1.3 times as fast in eight reads at once as in two, and reads of 2 MiB at 0.8 of that.
    """
    ways = [(threads, chunk) for threads in THREADS for chunk in CHUNKS]
    fastest = dict.fromkeys(ways, 0.0)
    for _ in range(_ROUNDS):
        for threads, chunk in ways:
            speed = measure_reads(extents, DirectDisk(chunk, threads))
            fastest[threads, chunk] = max(fastest[threads, chunk], speed)
    bar = max(fastest.values()) * _GOOD_ENOUGH
    chunk, threads = max(
        ((chunk, threads) for (threads, chunk), speed in fastest.items() if speed >= bar),
        key=lambda way: (way[1], way[0]),
    )
    return DiskSpeed(chunk, threads, fastest[threads, chunk])


def measure_reads(
    extents: Sequence[Extent], disk: DirectDisk, sample: int = _SAMPLE, seconds: float = _SECONDS
) -> float:
    """Bytes per second that `disk` reads of `extents`, for at most `sample` bytes or `seconds`; 0 if none is read."""
    work = iter([(one, at) for one in extents for at in range(0, one.nbytes - disk.chunk + 1, disk.chunk)])
    lock, totals = threading.Lock(), [0] * disk.threads
    into = page_buffer(max(disk.chunk, _BUFFER))[: disk.chunk]  # nobody looks at it: the readers share it
    into.fill(0)

    def reader(index: int) -> None:
        while sum(totals) < sample and time.perf_counter() - begun < seconds:
            with lock:
                item = next(work, None)
            if item is None:
                return
            try:
                totals[index] += disk.read(item[0].path, item[0].offset + item[1], into)
            except OSError:
                return

    threads = [threading.Thread(target=reader, args=(index,)) for index in range(disk.threads)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(totals) / (time.perf_counter() - begun)


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    with ExitStack() as stack:
        with suppress(OSError):  # where nothing can be written, nothing is remembered either
            make_private(lock.parent)
            fcntl.flock(stack.enter_context(open(lock, "wb", opener=private)), fcntl.LOCK_EX)
        yield


def _boot() -> str:
    """What tells this run of the machine from others, where the system says so."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "-"


def _load(record: Path) -> dict[str, DiskSpeed]:
    try:
        return {key: DiskSpeed(**fields) for key, fields in json.loads(record.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _save(record: Path, known: dict[str, DiskSpeed]) -> None:
    draft = record.with_suffix(f".{os.getpid()}.tmp")
    try:
        make_private(record.parent)
        with open(draft, "w", opener=private) as file:
            json.dump({key: asdict(speed) for key, speed in known.items()}, file)
        draft.replace(record)
    except OSError:
        with suppress(OSError):  # a cache that cannot be written costs a second at every start, no more
            draft.unlink()

"""The best read size and number of reads in flight for a disk: measured once, then remembered."""

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
THREADS = (4, 8)  # reads in flight; with fewer, the disk would be idle while a reader waits for a core
_SMALLEST = 256 << 10  # bytes of the smallest read: smaller ones slow every disk down
_LARGE = 4 << 20  # bytes: reads are not made smaller than this to have more than `_AT_ONCE` in flight
_AT_ONCE = 4
_LEAST = 32 << 20  # bytes: files with fewer are too small to measure
_ROUNDS = 2  # all candidates are measured twice and the faster time counts: other programs may disturb one round
_SAMPLE = 256 << 20  # bytes read per candidate and round at most
_BUFFER = 2 << 20  # bytes: a whole huge page, because a ring consists of huge pages
_SECONDS = 0.15  # seconds per candidate and round at most
_GOOD_ENOUGH = 0.85  # candidates with at least this share of the best speed count as nearly equal
_FRESH_S = 7 * 24 * 3600.0  # seconds after which a disk is measured again: it fills up and ages
_LEAST_RUN = 256 << 20  # bytes: a run that read less cannot contradict a measurement
_ODD = 2.0  # a run so many times faster or slower contradicts a measurement; computing slows reads down to 0.8 at most
_SAME = 1.3  # two measurements that differ by at most this factor agree


@dataclass(frozen=True)
class DiskSpeed:
    """The measured speed of one disk, and how to read it."""

    chunk: int = DEFAULT_CHUNK
    threads: int = DEFAULT_THREADS
    bytes_per_second: float = 0.0  # 0: not measured
    at: float = field(default=0.0, compare=False)  # when it was measured, in seconds since 1970
    doubted: bool = field(default=False, compare=False)  # a later run contradicted the measurement
    confirmed: bool = field(default=False, compare=False)  # after a doubt, a second measurement agreed with the first

    @property
    def reliable(self) -> bool:
        """True if the measurement is neither old nor marked as doubted."""
        return 0 <= time.time() - self.at < _FRESH_S and not self.doubted

    def contradicted_by(self, nbytes: int, seconds: float) -> bool:
        """Return True if a run that read `nbytes` in `seconds` contradicts the measurement, unless it is confirmed."""
        if self.confirmed or not self.bytes_per_second or nbytes < _LEAST_RUN or seconds <= 0:
            return False
        return not _agree(nbytes / seconds, self.bytes_per_second, _ODD)

    def open(self, block: int = 1 << 30) -> DirectDisk:
        """Return a disk that reads blocks of `block` bytes in equal parts, of about the measured size.

        Between two reads, a reader must get a core from the computing threads. So several reads are in flight: at least
        `_AT_ONCE`, and more if they can be larger than `_LARGE` each. At most one block's parts are in flight. With
        more, two blocks would share the disk and finish together, and the disk would be idle until the first had been
        used.
        """
        least = min(max(block // _LARGE, _AT_ONCE), self.threads)
        parts = max(round(block / self.chunk), least)
        return DirectDisk(max(round_up(-(-block // parts)), _SMALLEST), min(self.threads, parts))


def disk_for(files: Sequence[Path], cache: Path) -> DiskSpeed:
    """Return the best way to read the disk of `files`, from `cache`/disks.json, or measured now in 2.5 s.

    A measurement is stored in this file. It is valid for a week, but only until the next boot (after which disks may
    have other numbers), and only until a run contradicts it (`mark_doubted`). If the files are too small or unreadable,
    the defaults are returned and not stored. Processes that share a cache measure one after the other. So each has the
    disk to itself, and later ones find the measurement of the first.
    """
    present = [path for path in files if path.is_file()]
    extents = [Extent(path, 0, path.stat().st_size // PAGE * PAGE) for path in present]
    record = cache / "disks.json"
    with _one_at_a_time(record.with_suffix(".lock")):
        known, key = _load(record), _key(present[0]) if present else ""
        if key not in known or not known[key].reliable:
            if sum(extent.nbytes for extent in extents) < _LEAST:
                return DiskSpeed()
            known = {other: speed for other, speed in known.items() if _lasts(other)}
            known[key] = _confirmed(known.get(key), measure_disk(extents))
            _save(record, known)
        return known[key]


def known_speed(path: Path, cache: Path) -> float:
    """Return the speed of the disk that holds `path`, in bytes per second, from `cache`/disks.json; 0 if unknown."""
    with suppress(OSError):
        found = _load(cache / "disks.json").get(_key(path))
        return found.bytes_per_second if found else 0.0
    return 0.0


def mark_doubted(files: Sequence[Path], cache: Path) -> None:
    """Mark the measurement of the disk that holds `files` as doubted: the next start measures the disk again."""
    record = cache / "disks.json"
    present = [path for path in files if path.is_file()]
    with _one_at_a_time(record.with_suffix(".lock")):
        known = _load(record)
        key = _key(present[0]) if present else ""
        if key in known:
            _save(record, known | {key: replace(known[key], doubted=True)})


def _confirmed(before: DiskSpeed | None, found: DiskSpeed) -> DiskSpeed:
    """Return the new measurement `found`, with the time of now.

    Mark it as confirmed if it agrees with the earlier measurement `before`, which a run had contradicted.
    """
    doubted = before is not None and before.doubted
    same = before is not None and _agree(before.bytes_per_second, found.bytes_per_second, _SAME)
    return replace(found, at=time.time(), confirmed=doubted and same)


def _agree(one: float, other: float, times: float) -> bool:
    return one <= times * other and other <= times * one


def measure_disk(extents: Sequence[Extent]) -> DiskSpeed:
    """Measure the disk of `extents`; return the fastest number of reads in flight and size of a read, with its speed.

    Among nearly equal settings, the most reads in flight win, then the largest reads.

    Nothing else runs during the measurement, but later the readers compete with computing threads. In that situation
    tiles of 33 MiB arrived 1.1 to 1.3 times as fast with eight reads in flight as with two, and reads of 2 MiB reached
    0.8 of that speed.
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
    """Return the bytes per second at which `disk` reads `extents`; 0 if no byte was read.

    The measurement ends after `sample` bytes or `seconds` seconds.
    """
    work = iter([(one, at) for one in extents for at in range(0, one.nbytes - disk.chunk + 1, disk.chunk)])
    lock, totals = threading.Lock(), [0] * disk.threads
    into = page_buffer(max(disk.chunk, _BUFFER))[: disk.chunk]  # all readers share it: its contents are not used
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
        with suppress(OSError):  # a cache that cannot be written needs no lock
            make_private(lock.parent)
            fcntl.flock(stack.enter_context(open(lock, "wb", opener=private)), fcntl.LOCK_EX)
        yield


def _key(path: Path) -> str:
    """Return the key of the disk that holds `path`: the device's number and the current boot.

    In a testbed the key also names the emulated device, because each has a disk speed of its own, although they share a
    disk.
    """
    device = "".join(f"{os.environ[name]} " for name in ("TPI_TESTBED", "TPI_DEVICE") if name in os.environ)
    return f"{device}{path.stat().st_dev} {_boot()}"


def _lasts(key: str) -> bool:
    """Return True if `key` is of the current boot and, if it names a testbed, of the testbed of this process."""
    return key.endswith(f" {_boot()}") and (len(key.split()) == 2 or key.split()[0] == os.environ.get("TPI_TESTBED"))


def _boot() -> str:
    """Return an identifier of the current boot of the machine; `-` if the system has none."""
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
        with suppress(OSError):  # a cache that cannot be written only costs a measurement at every start
            draft.unlink()

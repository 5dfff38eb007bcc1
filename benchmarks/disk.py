"""The disk and the memory window on this machine: `python -m benchmarks.disk [--dir DIR] [--size 1GiB] [--json FILE]`.

Four tables: read speed by chunk and reads in flight; what a hold costs; streaming against the raw disk, measured by
turns in the same run; and predicted against measured stall over a grid of emulated disk speeds, windows and budgets.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from scheduler.disk import DirectDisk, Disk, MemoryDisk, ThrottledDisk
from scheduler.memory import PAGE
from scheduler.placement import Placement, Speeds, place, place_window
from scheduler.steady import verdict
from scheduler.tune import CHUNKS, THREADS, DiskSpeed, best, measure
from scheduler.window import Extent, MemoryWindow, Resident, Window
from tpi.config import parse_size

MIB = 1 << 20
Row = dict[str, Any]


def candidates(extents: Sequence[Extent]) -> Iterator[Row]:
    """Read speed of each way to read."""
    for threads in THREADS:
        for chunk in CHUNKS:
            speed = measure(extents, DirectDisk(chunk, threads), sample=512 * MIB, seconds=0.5)
            yield {"reads in flight": threads, "chunk KiB": chunk >> 10, "MB/s": round(speed / 1e6)}


def hold_costs(path: Path, disk: DiskSpeed) -> Iterator[Row]:
    """Microseconds per hold of a block that is in memory."""
    extents = [Extent(path, block * MIB, 16 * PAGE) for block in range(44)]
    placement = place_window([extent.slot_bytes for extent in extents], 8)
    windows: dict[str, Window] = {
        "resident": Resident(extents),
        "window, block stays": MemoryWindow(extents, 1 << 30, disk.open()),
        "window, block streamed": MemoryWindow(extents, placement, disk.open()),
    }
    for name, window in windows.items():
        taken = []
        for block in [*range(44)] * 10:
            time.sleep(0.001)  # by then it is loaded
            begun = time.perf_counter()
            with window.hold(block):
                pass
            taken.append(time.perf_counter() - begun)
        window.close()
        yield {"hold": name, "median us": round(median(taken) * 1e6, 1)}


def run(window: Window, blocks: int, tokens: int, work: float = 0.0) -> tuple[float, float]:
    """Median seconds, and seconds of stall, per token. A block is summed, or takes `work` seconds."""
    seconds, stalls = [], []
    for _ in range(tokens):
        begun = time.perf_counter()
        for block in range(blocks):
            with window.hold(block) as data:
                if work:
                    time.sleep(work)
                else:
                    data.view(np.uint64).sum()
        seconds.append(time.perf_counter() - begun)
        stalls.append(window.take().stall_seconds)
    return median(seconds[tokens // 3 :]), median(stalls[tokens // 3 :])


def streaming(path: Path, disk: DiskSpeed) -> Iterator[Row]:
    """Token time against the least that the disk and the resident speed allow."""
    whole = [Extent(path, 0, path.stat().st_size // PAGE * PAGE)]
    pair, blocks = (12 * MIB, 36 * MIB), 2 * max(2, whole[0].nbytes // (48 * MIB))
    offsets = [sum(pair[b % 2] for b in range(block)) for block in range(blocks)]
    extents = [
        Extent(path, at % (whole[0].nbytes - pair[1]) // PAGE * PAGE, pair[b % 2]) for b, at in enumerate(offsets)
    ]
    total = sum(extent.nbytes for extent in extents)
    floor, _ = run(Resident(extents, disk.open()), blocks, 5)
    for share in (0.12, 0.25, 0.5, 0.75, 0.95, 1.0):
        before = measure(whole, disk.open(), sample=256 * MIB, seconds=2)
        window = MemoryWindow(
            extents, place([e.slot_bytes for e in extents], int(total * share), Speeds()), disk.open()
        )
        window.fill()
        token, stall = run(window, blocks, 6)
        window.close()
        raw = (before + measure(whole, disk.open(), sample=256 * MIB, seconds=2)) / 2
        least = max(window.placement.streamed_bytes / raw, floor)
        yield {
            "budget": f"{share:.0%}",
            "streamed MiB": window.placement.streamed_bytes >> 20,
            "raw MB/s": round(raw / 1e6),
            "token ms": round(token * 1e3, 1),
            "stall ms": round(stall * 1e3, 1),
            "of the possible": round(least / token, 3),
        }


def predictions() -> Iterator[Row]:
    """Predicted and measured stall over a grid of emulated disk speeds, windows and budgets."""
    sizes = [64 * PAGE, 128 * PAGE] * 8
    files = {Path(f"block{block}"): bytes(size) for block, size in enumerate(sizes)}
    extents = [Extent(path, 0, size) for path, size in zip(files, sizes, strict=True)]
    placements: dict[str, Placement] = {f"window {k}": place_window(sizes, k) for k in (1, 2, 3, 4)}
    placements |= {f"window 2, retain {t}": place_window(sizes, 2, t) for t in (1, 2, 4)}
    placements |= {f"budget {share:.0%}": place(sizes, int(sum(sizes) * share)) for share in (0.25, 0.5, 0.75, 1.0)}
    work = 0.006
    for share in (0.4, 0.8, 1.2, 2.0, 4.0):
        for name, placement in placements.items():
            speed = sum(sizes) / (share * work * len(sizes))
            disk: Disk = ThrottledDisk(MemoryDisk(files, 16 * PAGE, 2), speed)
            window = MemoryWindow(extents, placement, disk)
            window.fill()
            token, stall = run(window, len(sizes), 15, work)
            window.close()
            report = verdict(placement, window.costs(), window.history())
            off = abs(report.stall_seconds - stall)
            yield {
                "disk MB/s": round(speed / 1e6, 1),
                "placement": name,
                "token ms": round(token * 1e3, 1),
                "stall ms": round(stall * 1e3, 2),
                "predicted ms": round(report.stall_seconds * 1e3, 2),
                "loose": report.loose,
                "tight": report.tight,
                "steady": report.steady,
                "agrees": off <= max(0.1 * stall, 0.02 * token),
                "verdict agrees": report.steady == (stall <= 0.02 * token),
            }


def show(title: str, rows: Iterator[Row]) -> list[Row]:
    """Print a table as it is made."""
    print(f"\n{title}", flush=True)
    made: list[Row] = []
    for row in rows:
        if not made:
            print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
        print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)
        made.append(row)
    return made


@contextmanager
def scratch(folder: Path | None, size: int) -> Iterator[Path]:
    """A file of random bytes, removed afterwards."""
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".shard") as file:
        for _ in range(size // (8 * MIB)):
            file.write(np.random.default_rng().bytes(8 * MIB))
        file.flush()
        yield Path(file.name)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure")
    parser.add_argument("--size", type=parse_size, default="512MiB", help="bytes of the file that is read")
    parser.add_argument("--json", type=Path, help="write the tables there")
    options = parser.parse_args()
    with scratch(options.dir, options.size) as path:
        tables = {"candidates": show("Read speed", candidates([Extent(path, 0, options.size)]))}
        disk = best([Extent(path, 0, options.size)])
        tables["holds"] = show("Cost of a hold", hold_costs(path, disk))
        tables["streaming"] = show("Streaming against the raw disk", streaming(path, disk))
    tables["predictions"] = show("Predicted against measured", predictions())
    if options.json:
        options.json.write_text(json.dumps(tables, indent=1))


if __name__ == "__main__":
    main()

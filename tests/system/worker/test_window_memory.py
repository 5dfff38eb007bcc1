"""Proposition 5: the peak memory of a process that streams is the predicted one, measured from outside."""

import subprocess
import sys
from pathlib import Path

import pytest

from scheduler.model.placement import place, place_window
from tpi.devices.pages import PAGE

MIB = 1 << 20
SIZES = [2 * MIB, 6 * MIB + PAGE] * 5
SCRIPT = """
import sys
from pathlib import Path
from scheduler.model.placement import place, place_window
from scheduler.window.window import Extent, MemoryWindow

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

path, kind, number, *sizes = sys.argv[1:]
sizes = [int(size) for size in sizes]
extents = [Extent(Path(path), sum(sizes[:block]), size) for block, size in enumerate(sizes)]
placement = {"window": place_window, "budget": place}[kind](sizes, int(number))
bare = peak()
window = MemoryWindow(extents, placement)
for _ in range(3):
    for block in range(len(sizes)):
        with window.hold(block) as data:
            data.sum()
window.close()
print(peak() - bare)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(("kind", "number"), [("window", 2), ("window", 4), ("budget", 16 * MIB), ("budget", 40 * MIB)])
def test_peak_memory_is_what_was_predicted(tmp_path: Path, kind: str, number: int) -> None:
    path = tmp_path / "blocks.shard"
    path.write_bytes(bytes(sum(SIZES)))
    command = [sys.executable, "-c", SCRIPT, path, kind, number, *SIZES]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60, check=True)
    predicted = (place_window if kind == "window" else place)(SIZES, number).memory_bytes
    assert int(done.stdout) == pytest.approx(predicted, rel=0.1)
    if kind == "budget":
        assert predicted <= number

"""Inspection of packs, and of the folders in which they are made."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tpi.pack.builder.quantise import decode_part
from tpi.pack.reader import PackBlock
from tpi.progress import Progress, silent

F32 = npt.NDArray[np.float32]


@contextmanager
def quiet(title: str) -> Iterator[Progress]:
    yield silent


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def part(block: PackBlock, run: str, name: str) -> F32:
    """Return all vectors of one part of a run, padding included: `[units * width, hidden]`."""
    layout = block.run(run)
    return decode_part(layout.part(name), layout, block.read_units(run, 0, layout.units))


def runs(block: PackBlock) -> list[tuple[str, str]]:
    return [(run.name, item.name) for run in block.shape.runs for item in run.parts]

"""Kernels that convert packed weights to float32: some rows of a table, or a whole part."""

from typing import Any

import numpy as np

from tpi.devices.opencl.card import OpenClCard
from tpi.devices.opencl.compute.products import PackedPart
from tpi.devices.opencl.programs import Program
from tpi.kernels.spec import F32, I32


def decode(card: OpenClCard, matrix: PackedPart, listed: I32 | None = None) -> F32:
    """Return the vectors of a part whose numbers are in `listed` (None: all), float32 `[vectors, hidden]`."""
    run, program = matrix.run, Program(("formats", "decode"), (matrix.defined,))
    count = matrix.vectors if listed is None else len(listed)
    which: Any = None if listed is None else card.upload(listed)
    out, work = card.empty(count, run.hidden), [count]
    if run.layout == "record":
        where: tuple[Any, ...] = (np.uint64(run.record_bytes), run.hidden)
        card.launch(program, "decode_records", work, matrix.buffer, matrix.offset, *where, which, out)
    else:
        where = (np.uint64(run.unit_bytes), run.width, matrix.part.axis == "column", run.hidden)
        card.launch(program, "decode_tiles", work, matrix.buffer, matrix.offset, *where, which, out)
    return card.download(out, count, run.hidden)

"""The 32 bytes in front of every collective frame.

| field   | bytes | meaning                                                              |
|---------|-------|----------------------------------------------------------------------|
| magic   | 4     | "TPIa"                                                               |
| version | 1     | of this layout                                                       |
| wire    | 1     | format of the payload (`Wire.code`)                                  |
| rank    | 2     | of the sender                                                        |
| session | 8     | one per master run, random                                           |
| epoch   | 4     | one per plan                                                         |
| step    | 4     | one per forward pass                                                 |
| tag     | 4     | number of the message in the step << 12, segment of the message      |
| count   | 4     | values in the payload                                                |

Little-endian. A receiver knows every field of the frame that it waits for.
"""

from struct import Struct
from typing import NamedTuple

MAGIC = b"TPIa"
VERSION = 1
SEGMENT_BITS = 12

LAYOUT = Struct("<4sBBHQIIII")
HEADER_BYTES = LAYOUT.size


class Header(NamedTuple):
    """All fields, in their order."""

    magic: bytes
    version: int
    wire: int
    rank: int
    session: int
    epoch: int
    step: int
    tag: int
    values: int


def parse(frame: bytes | memoryview) -> Header | None:
    """The header of `frame`, None if it has none of this version."""
    if len(frame) < HEADER_BYTES:
        return None
    header = Header._make(LAYOUT.unpack_from(frame))
    return header if (header.magic, header.version) == (MAGIC, VERSION) else None

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

Little-endian. A receiver knows every field of the frame that it waits for, so it compares bytes; it parses only
what is not that frame.
"""

from struct import Struct
from typing import NamedTuple

MAGIC = b"TPIa"
VERSION = 1
SEGMENT_BITS = 12

_LAYOUT = Struct("<4sBBHQIIII")
HEADER_BYTES = _LAYOUT.size


class Header(NamedTuple):
    """The fields that differ between frames."""

    wire: int
    rank: int
    session: int
    epoch: int
    step: int
    tag: int
    length: int  # values in the payload

    def pack(self) -> bytes:
        """The 32 bytes."""
        return _LAYOUT.pack(MAGIC, VERSION, *self)


def parse(frame: bytes | memoryview) -> Header | None:
    """The header of `frame`, None if it has none of this version."""
    if len(frame) < HEADER_BYTES:
        return None
    magic, version, *fields = _LAYOUT.unpack_from(frame)
    return Header(*fields) if magic == MAGIC and version == VERSION else None


def message_tag(number: int, segment: int) -> int:
    """Tag of segment `segment` of the step's message number `number`."""
    return number << SEGMENT_BITS | segment

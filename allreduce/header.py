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

Little-endian. A receiver knows every field of the frame that it waits for. `native/header.hpp` has the same for C++,
which writes and compares them.
"""

from struct import Struct

MAGIC = b"TPIa"
VERSION = 1
SEGMENT_BITS = 12

LAYOUT = Struct("<4sBBHQIIII")
HEADER_BYTES = LAYOUT.size

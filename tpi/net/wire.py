"""Wire formats of the collectives: how float32 values travel between nodes.

`allreduce._mailbox` encodes and decodes them.

| name | bytes            | loss                                                                       |
|------|------------------|----------------------------------------------------------------------------|
| f32  | 4 per value      | none                                                                       |
| bf16 | 2 per value      | 16 of 24 bits of mantissa; rounds to nearest, ties to even                 |
| q8   | 34 per 32 values | 32 values share an f16 scale, codes in -127..127 (the layout of GGUF Q8_0) |

Every format is little-endian. A value that is not finite is still not finite after decoding.
"""

from dataclasses import dataclass

from tpi.errors import UsageError

GROUP = 32  # values that share a scale in q8; a vector cut at multiples of 32 has the same encoding as the whole


@dataclass(frozen=True)
class Wire:
    """One wire format: its name, its code in a frame's header, and the size of its groups."""

    name: str
    code: int  # the format's number in the header of a frame
    group: int  # number of values encoded together; the last group is padded with 0
    group_bytes: int

    def nbytes(self, count: int) -> int:
        """Return the number of bytes that `count` values take."""
        return -(-count // self.group) * self.group_bytes


EXACT = Wire("f32", 0, 1, 4)
"""The format that sends float32 values unchanged."""

_WIRES = {wire.name: wire for wire in (EXACT, Wire("bf16", 1, 1, 2), Wire("q8", 2, GROUP, 2 + GROUP))}


def wire_names() -> tuple[str, ...]:
    """Return the names of the wire formats."""
    return tuple(_WIRES)


def wire_format(name: str) -> Wire:
    """Return the wire format called `name`.

    Raises:
        UsageError: if no wire format has that name.
    """
    if name not in _WIRES:
        raise UsageError(f"unknown wire format {name!r}; choose one of {', '.join(_WIRES)}")
    return _WIRES[name]

"""Wire formats of the collectives: how float32 values travel between nodes. `allreduce._mailbox` reads and writes them.

| name | bytes            | what is lost                                                              |
|------|------------------|---------------------------------------------------------------------------|
| f32  | 4 per value      | nothing                                                                   |
| bf16 | 2 per value      | 16 of 24 bits of mantissa; rounds to nearest, ties to even                |
| q8   | 34 per 32 values | 32 values share an f16 scale, codes in -127..127 (the layout of GGUF Q8_0) |

Every format is little-endian, and a value that is not finite stays not finite.
"""

from dataclasses import dataclass

from tpi.errors import UsageError

GROUP = 32  # values that share one scale in q8; parts of a vector that are cut at multiples of it encode alike


@dataclass(frozen=True)
class Wire:
    """One wire format."""

    name: str
    code: int  # how a frame's header names the format
    group: int  # values that are encoded together; the last group is padded with 0
    group_bytes: int

    def nbytes(self, count: int) -> int:
        """Bytes that `count` values take."""
        return -(-count // self.group) * self.group_bytes


EXACT = Wire("f32", 0, 1, 4)
"""The values as they are."""

_WIRES = {wire.name: wire for wire in (EXACT, Wire("bf16", 1, 1, 2), Wire("q8", 2, GROUP, 2 + GROUP))}


def wire_names() -> tuple[str, ...]:
    """Names of the wire formats."""
    return tuple(_WIRES)


def wire_format(name: str) -> Wire:
    """A wire format by name.

    Raises:
        UsageError: if there is none of that name.
    """
    if name not in _WIRES:
        raise UsageError(f"unknown wire format {name!r}; choose one of {', '.join(_WIRES)}")
    return _WIRES[name]

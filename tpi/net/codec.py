"""Encoding of messages as frames: a msgpack header, then raw bytes. Strict in both directions; nothing is pickled.

The header is `[protocol, type name, field, field, ...]` in the order of the dataclass. Nested dataclasses are arrays
too. Raw bytes (arrays, digests, units) are one stream after the header, cut into frames of at most `FRAME_BYTES`. So
one limit per frame holds for every socket, and a heartbeat never waits long behind a large message.

Received frames either decode to a message that would encode to the same bytes, or raise `MessageError`.
"""

from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from typing import Any, TypeVar

import msgpack

from tpi.errors import MessageError, TpiError
from tpi.net.schema import ArrayField, Between, Pieces, Raw, Schema, compile_dataclass
from tpi.text import plain

__all__ = [
    "FRAME_BYTES",
    "MEANING",
    "ArrayField",
    "Between",
    "Raw",
    "WrongProtocolError",
    "decode",
    "encode",
    "message",
    "protocol",
]

MEANING = 9
"""Version of the messages' meaning, part of the protocol number.

Increase it when nodes would interpret the same message differently: orders of tasks, frames of sums, layouts of units.
"""
FRAME_BYTES = 256 << 10
HEADER_BYTES = 128 << 10  # msgpack of hostile headers grows by at most about 60 times in memory
MAX_FRAMES = 1 + (256 << 20) // FRAME_BYTES

Buffer = bytes | memoryview
Class = TypeVar("Class", bound=type)

_classes: dict[str, type] = {}
_schemas: dict[type, Schema] = {}


class WrongProtocolError(MessageError):
    """Raised for a message of another protocol.

    `number` is the number of the other protocol, `version` the sender's TPI version if the message contains it.
    """

    def __init__(self, number: int, version: str = "") -> None:
        sender = f"tpi {version} (protocol {number:x})" if version else f"a tpi of protocol {number:x}"
        super().__init__(sender)
        self.number, self.version = number, version


@cache
def protocol() -> int:
    """Return the number of the protocol that this TPI speaks: 32 bits of a hash over all messages and `MEANING`.

    Two checkouts whose messages differ have different numbers, even if their version is the same.
    """
    import tpi.net.messages  # these define all messages
    import tpi.net.transfers  # noqa: F401

    own = sorted(name for name, cls in _classes.items() if cls.__module__.startswith("tpi.net."))
    text = "\n".join([str(MEANING), *(_schema(_classes[name]).described for name in own)])
    return int.from_bytes(sha256(text.encode()).digest()[:4], "big")


def message(cls: Class) -> Class:
    """Register a frozen dataclass as a message that may be sent by itself. A class decorator."""
    _classes[cls.__name__] = cls
    return cls


def encode(value: object) -> list[Buffer]:
    """Return the frames of a message. Large buffers are views of the message's own memory.

    Raises:
        MessageError: if a field is of the wrong type or beyond its limits.
    """
    if _classes.get(type(value).__name__) is not type(value):
        raise MessageError(f"{type(value).__name__} is not a message")
    pieces = Pieces(FRAME_BYTES)
    header = [protocol(), type(value).__name__, *_schema(type(value)).to_wire(value, pieces)]
    try:
        packed: bytes = msgpack.packb(header, use_bin_type=True)
    except UnicodeEncodeError as error:
        raise MessageError(f"a {type(value).__name__} contains text that is not UTF-8: {error.reason}") from None
    if len(packed) > HEADER_BYTES:
        raise MessageError(f"a {type(value).__name__} has a header of {len(packed)} bytes; the limit is {HEADER_BYTES}")
    return [packed, *pieces.frames()]


def decode(frames: Sequence[Buffer]) -> Any:
    """Return the message that `frames` encode.

    Raises:
        WrongProtocolError: if the frames are of another protocol version.
        MessageError: if the frames are not a message.
    """
    header = _header(frames)
    if len(header) < 2 or type(header[0]) is not int or type(header[1]) is not str:
        raise MessageError("the header does not begin with protocol and type")
    if header[0] != protocol():
        raise WrongProtocolError(header[0], _version_of(header))
    cls = _classes.get(header[1])
    if cls is None:
        raise MessageError("the message has an unknown type")
    pieces = Pieces(FRAME_BYTES, frames[1:])
    try:
        value = _schema(cls).from_wire(header[2:], pieces)
    except MessageError as error:
        raise MessageError(f"{cls.__name__}: {error}") from None
    except (TpiError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise MessageError(f"{cls.__name__}: {error}") from error
    if not pieces.exhausted:
        raise MessageError(f"{cls.__name__}: there are bytes after its end")
    return value


def _header(frames: Sequence[Buffer]) -> list[Any]:
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise MessageError(f"a message cannot have {len(frames)} frames")
    if len(frames[0]) > HEADER_BYTES or any(len(frame) > FRAME_BYTES for frame in frames[1:]):
        raise MessageError("a frame is larger than the limit")
    size = len(frames[0])
    try:
        header = msgpack.unpackb(frames[0], raw=False, strict_map_key=True, max_str_len=8192, max_bin_len=size,
                                 max_array_len=size, max_map_len=0, max_ext_len=0)  # fmt: skip
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise MessageError(f"the header is not msgpack ({type(error).__name__})") from None
    if type(header) is not list:
        raise MessageError("the header is not an array")
    return header


def _version_of(header: list[Any]) -> str:
    """Return the TPI version that the sender of another protocol states, or an empty string.

    Join, Hello and Refuse must therefore keep the version as their first field. Protocol 6 and earlier append their
    protocol to the version; that part is left out.
    """
    named = len(header) > 2 and header[1] in ("Join", "Hello", "Refuse") and type(header[2]) is str
    return plain(header[2].partition(" (protocol ")[0]) if named else ""


def _schema(cls: type) -> Schema:
    if cls not in _schemas:
        _schemas[cls] = compile_dataclass(cls)
    return _schemas[cls]

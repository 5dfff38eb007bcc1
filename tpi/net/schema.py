"""Checks and conversions of message fields, compiled from the type annotations of frozen dataclasses.

Annotations understood: int, float, bool, str, bytes, Literal, `X | None`, `tuple[X, ...]`, frozen dataclasses, and,
through `Annotated`, limits (`Between`), raw bytes (`Raw` on bytes or memoryview) and arrays (`ArrayField` on numpy
arrays).
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tpi.errors import MessageError


@dataclasses.dataclass(frozen=True)
class Between:
    """Inclusive limits of a number, or of the length of a str or bytes."""

    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Raw:
    """Annotation of a bytes field of at most `limit` bytes, which are sent after the header."""

    limit: int


@dataclasses.dataclass(frozen=True)
class ArrayField:
    """Annotation of a C-contiguous array field, which is sent after the header.

    `dtype` is a little-endian numpy name, `ndim` the number of axes.
    """

    dtype: str
    ndim: int
    limit: int  # bytes


class Pieces:
    """The raw stream of one message. Encoding appends to it, decoding takes from it."""

    def __init__(self, frame_bytes: int, frames: Sequence[bytes | memoryview] = ()) -> None:
        self._frame_bytes = frame_bytes
        self._views = [memoryview(frame).cast("B") for frame in frames]
        self._left = sum(map(len, self._views))
        self._index = 0
        self._offset = 0

    def put(self, data: bytes | memoryview) -> None:
        """Append a buffer to the message without copying the buffer."""
        if len(data):
            self._views.append(memoryview(data).cast("B"))

    def frames(self) -> list[bytes | memoryview]:
        """Return all appended bytes as frames. Large buffers are cut, small ones joined."""
        frames: list[bytes | memoryview] = []
        small: list[memoryview] = []
        joined = 0
        for view in self._views:
            if joined + len(view) <= self._frame_bytes:
                small.append(view)
                joined += len(view)
                continue
            frames += [b"".join(small)] if small else []
            small, joined = [], 0
            frames += [view[at : at + self._frame_bytes] for at in range(0, len(view), self._frame_bytes)]
        if small:
            frames.append(small[0] if len(small) == 1 else b"".join(small))
        return frames

    def take(self, count: int) -> memoryview:
        """Return the next `count` bytes: a view if one frame holds them all, else a copy.

        Raises:
            MessageError: if fewer bytes are left.
        """
        if self._left < count:
            raise MessageError("too few bytes")
        self._left -= count
        parts: list[memoryview] = []
        left = count
        while left:
            view = self._views[self._index][self._offset :]
            parts.append(view[:left])
            left -= len(parts[-1])
            done = len(parts[-1]) == len(view)
            self._index, self._offset = (self._index + 1, 0) if done else (self._index, self._offset + len(parts[-1]))
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    @property
    def exhausted(self) -> bool:
        """True if every byte of every frame was taken, and no frame was empty."""
        return self._index == len(self._views)


@dataclasses.dataclass(frozen=True)
class Schema:
    """The conversions of one type's values into a message header and back. Both check the value."""

    to_wire: Callable[[Any, Pieces], Any]
    from_wire: Callable[[Any, Pieces], Any]
    described: str
    """Description that both ends must agree on: names, types, limits and order. It is equal in every version of Python.
    """


def compile_dataclass(cls: type) -> Schema:
    """Return the schema of a frozen dataclass: an array of its fields in order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = [(field.name, _compile(hints[field.name])) for field in dataclasses.fields(cls)]

    def to_wire(value: Any, pieces: Pieces) -> list[Any]:
        _require(type(value) is cls, f"expected {cls.__name__}, not {type(value).__name__}")
        return [_named(name, schema.to_wire, getattr(value, name), pieces) for name, schema in fields]

    def from_wire(value: Any, pieces: Pieces) -> Any:
        _require(type(value) is list and len(value) == len(fields), f"{cls.__name__} has {len(fields)} fields")
        values = zip(fields, value, strict=True)
        return cls(*[_named(name, schema.from_wire, item, pieces) for (name, schema), item in values])

    described = ", ".join(f"{name}: {schema.described}" for name, schema in fields)
    return Schema(to_wire, from_wire, f"{cls.__name__}({described})")


def _named(name: str, convert: Callable[[Any, Pieces], Any], value: Any, pieces: Pieces) -> Any:
    try:
        return convert(value, pieces)
    except MessageError as error:
        raise MessageError(f"{name}: {error}") from None


def _compile(annotation: Any) -> Schema:
    limit: Any = None
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *limits = typing.get_args(annotation)
        limit = next((item for item in limits if isinstance(item, Between | Raw | ArrayField)), None)
    if isinstance(limit, ArrayField):
        return _tensor(limit)
    if isinstance(limit, Raw):
        return _raw(limit, keep_view=annotation is memoryview)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return _literal(arguments)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments)
    if origin is tuple:
        return _tuple(arguments)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return compile_dataclass(annotation)
    return _scalar(annotation, limit)


_DEFAULT_LIMITS: dict[type, Between] = {
    int: Between(-(2**63), 2**64 - 1),
    float: Between(-math.inf, math.inf),
    str: Between(0, 4096),
    bytes: Between(0, 4096),
    bool: Between(0, 1),
}


def _scalar(kind: Any, limit: Between | None) -> Schema:
    if kind not in _DEFAULT_LIMITS:
        raise TypeError(f"a message cannot hold {kind!r}")
    allowed = limit or _DEFAULT_LIMITS[kind]

    def check(value: Any, _: Pieces) -> Any:
        _require(type(value) is kind, f"expected {kind.__name__}, not {type(value).__name__}")
        size = len(value) if kind in (str, bytes) else value
        # NaN and infinity fail this comparison too
        _require(allowed.low <= size <= allowed.high and abs(size) != math.inf, "beyond its limits")
        return value

    def to_wire(value: Any, pieces: Pieces) -> Any:
        return check(float(value) if kind is float and type(value) is int else value, pieces)

    return Schema(to_wire, check, f"{kind.__name__}[{allowed.low!r}..{allowed.high!r}]")


def _literal(options: tuple[Any, ...]) -> Schema:
    def check(value: Any, _: Pieces) -> Any:
        _require(type(value) is str and value in options, f"expected one of {', '.join(map(str, options))}")
        return value

    return Schema(check, check, "|".join(map(repr, options)))


def _union(arguments: tuple[Any, ...]) -> Schema:
    if all(typing.get_origin(argument) is typing.Literal for argument in arguments):
        return _literal(tuple(option for argument in arguments for option in typing.get_args(argument)))
    (inner,) = (argument for argument in arguments if argument is not type(None))
    schema = _compile(inner)
    return Schema(
        lambda value, pieces: None if value is None else schema.to_wire(value, pieces),
        lambda value, pieces: None if value is None else schema.from_wire(value, pieces),
        f"{schema.described}?",
    )


def _tuple(arguments: tuple[Any, ...]) -> Schema:
    if len(arguments) != 2 or arguments[1] is not Ellipsis:
        raise TypeError("a message holds tuples of the form tuple[X, ...]")
    schema = _compile(arguments[0])

    def to_wire(value: Any, pieces: Pieces) -> list[Any]:
        _require(type(value) is tuple, f"expected tuple, not {type(value).__name__}")
        return [schema.to_wire(item, pieces) for item in value]

    def from_wire(value: Any, pieces: Pieces) -> tuple[Any, ...]:
        _require(type(value) is list, "expected an array")
        return tuple([schema.from_wire(item, pieces) for item in value])

    return Schema(to_wire, from_wire, f"({schema.described})*")


def _raw(limit: Raw, keep_view: bool) -> Schema:
    def to_wire(value: Any, pieces: Pieces) -> int:
        _require(isinstance(value, bytes | bytearray | memoryview), "expected bytes")
        view = memoryview(value).cast("B")
        _require(len(view) <= limit.limit, f"it has more than the {limit.limit} bytes allowed")
        pieces.put(view)
        return len(view)

    def from_wire(value: Any, pieces: Pieces) -> Any:
        _require(type(value) is int and 0 <= value <= limit.limit, "not a length")
        view = pieces.take(value)
        return view if keep_view else bytes(view)

    return Schema(to_wire, from_wire, f"raw[{limit.limit}]")


def _tensor(limit: ArrayField) -> Schema:
    dtype = np.dtype(limit.dtype)

    def to_wire(value: Any, pieces: Pieces) -> list[int]:
        _require(isinstance(value, np.ndarray) and value.dtype == dtype and value.ndim == limit.ndim, "wrong array")
        _require(value.nbytes <= limit.limit, f"it has more than the {limit.limit} bytes allowed")
        if value.size:
            pieces.put(np.ascontiguousarray(value).data.cast("B"))
        return list(value.shape)

    def from_wire(value: Any, pieces: Pieces) -> Any:
        _require(type(value) is list and len(value) == limit.ndim, "wrong number of axes")
        _require(
            all(type(size) is int and 0 <= size < 2**31 for size in value),
            "it has a negative axis, or one of 2^31 or more",
        )
        nbytes = math.prod(value) * dtype.itemsize
        _require(nbytes <= limit.limit, f"it has more than the {limit.limit} bytes allowed")
        # copied because frames are not aligned, and their memory belongs to the socket
        return np.frombuffer(pieces.take(nbytes), dtype).reshape(value).copy() if nbytes else np.empty(value, dtype)

    return Schema(to_wire, from_wire, f"{limit.dtype}{limit.ndim}[{limit.limit}]")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise MessageError(problem)

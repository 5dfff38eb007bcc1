"""Wire formats of the collectives: how float32 values travel between nodes.

| name | bytes            | what is lost                                                              |
|------|------------------|---------------------------------------------------------------------------|
| f32  | 4 per value      | nothing                                                                   |
| bf16 | 2 per value      | 16 of 24 bits of mantissa; rounds to nearest, ties to even                |
| q8   | 34 per 32 values | 32 values share an f16 scale, codes in -127..127 (the layout of GGUF Q8_0) |

Every format is little-endian, and a value that is not finite stays not finite. A format may hold scratch memory, so an
instance belongs to one thread.
"""

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from tpi import kernels
from tpi.errors import UsageError
from tpi.kernels.spec import F32, Raw

Bytes = npt.NDArray[np.uint8]

GROUP = 32  # values that share one scale in q8; parts of a vector that are cut at multiples of it encode alike
_Q8 = np.dtype([("scale", "<f2"), ("codes", "i1", (GROUP,))])
_F16_MAX = np.float32(65504)


class Wire(ABC):
    """One wire format. Arrays are 1-D. What is decoded starts at byte `offset` of `raw`, which may be longer."""

    name: str
    code: int  # how a frame's header names the format, which `allreduce._mailbox` reads and writes too, in C++

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """Bytes that `count` values take."""

    @abstractmethod
    def encode(self, values: F32, raw: Bytes) -> None:
        """Write `values` into the first `nbytes(len(values))` bytes of `raw`."""

    @abstractmethod
    def decode(self, raw: Raw, out: F32, offset: int = 0) -> None:
        """Write the values of `raw` to `out`."""

    @abstractmethod
    def add(self, raw: Raw, total: F32, offset: int = 0) -> None:
        """Add the values of `raw` to `total`."""


class Viewed(Wire):
    """A format of which numpy makes a float32 array."""

    @abstractmethod
    def view(self, raw: Raw, count: int, offset: int = 0) -> F32:
        """The `count` values that `raw` holds; valid until the next call, and while `raw` is."""

    def decode(self, raw: Raw, out: F32, offset: int = 0) -> None:
        """Write the values of `raw` to `out`."""
        np.copyto(out, self.view(raw, out.size, offset))

    def add(self, raw: Raw, total: F32, offset: int = 0) -> None:
        """Add the values of `raw` to `total`."""
        np.add(total, self.view(raw, total.size, offset), out=total)


class Float32(Viewed):
    """The values as they are."""

    name, code = "f32", 0

    def nbytes(self, count: int) -> int:
        """Bytes that `count` values take."""
        return 4 * count

    def encode(self, values: F32, raw: Bytes) -> None:
        """Write `values` to `raw`."""
        np.copyto(raw[: values.nbytes].view(np.float32), values)

    def view(self, raw: Raw, count: int, offset: int = 0) -> F32:
        """The first `count` values of `raw`."""
        return np.frombuffer(raw, np.float32, count, offset)


class BFloat16(Wire):
    """The upper half of each float32, rounded."""

    name, code = "bf16", 1

    def nbytes(self, count: int) -> int:
        """Bytes that `count` values take."""
        return 2 * count

    def encode(self, values: F32, raw: Bytes) -> None:
        """Write `values` to `raw`."""
        kernels.to_bf16(values, raw)

    def decode(self, raw: Raw, out: F32, offset: int = 0) -> None:
        """Write the values of `raw` to `out`."""
        kernels.from_bf16(raw, offset, out)

    def add(self, raw: Raw, total: F32, offset: int = 0) -> None:
        """Add the values of `raw` to `total`."""
        kernels.add_bf16(raw, offset, total)


class Q8(Viewed):
    """Groups of 32 values: scale = largest magnitude / 127 as f16, then int8 codes. The last group is padded with 0."""

    name, code = "q8", 2

    def __init__(self) -> None:
        self._scratch = np.empty((0, GROUP), np.float32)

    def nbytes(self, count: int) -> int:
        """Bytes that `count` values take."""
        return -(-count // GROUP) * _Q8.itemsize

    def encode(self, values: F32, raw: Bytes) -> None:
        """Write `values` to `raw`."""
        groups = -(-values.size // GROUP)
        packed = raw[: groups * _Q8.itemsize].view(_Q8)
        work = self._groups(groups)
        flat = work.reshape(-1)
        flat[: values.size] = values
        flat[values.size :] = 0
        largest = np.maximum(work.max(axis=1), -work.min(axis=1))
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            scale = np.minimum(largest / 127, _F16_MAX).astype(np.float16)
            np.multiply(work, (1 / scale.astype(np.float32))[:, None], out=work)
            np.rint(work, out=work)
            np.clip(work, -127, 127, out=work)
            work[scale == 0] = 0
            packed["scale"] = np.where(np.isfinite(largest), scale, np.float16("nan"))
            np.copyto(packed["codes"], work, casting="unsafe")

    def view(self, raw: Raw, count: int, offset: int = 0) -> F32:
        """The first `count` values of `raw`."""
        groups = -(-count // GROUP)
        packed = np.frombuffer(raw, _Q8, groups, offset)
        work = self._groups(groups)
        np.multiply(packed["codes"], packed["scale"].astype(np.float32)[:, None], out=work)
        return work.reshape(-1)[:count]

    def _groups(self, groups: int) -> F32:
        if len(self._scratch) < groups:
            self._scratch = np.empty((groups, GROUP), np.float32)
        return self._scratch[:groups]


_WIRES: dict[str, type[Wire]] = {kind.name: kind for kind in (Float32, BFloat16, Q8)}


def wire_names() -> tuple[str, ...]:
    """Names of the wire formats."""
    return tuple(_WIRES)


def open_wire(name: str) -> Wire:
    """A wire format by name.

    Raises:
        UsageError: if there is none of that name.
    """
    if name not in _WIRES:
        raise UsageError(f"unknown wire format {name!r}; choose one of {', '.join(_WIRES)}")
    return _WIRES[name]()

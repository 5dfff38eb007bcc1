"""Records of the experts that a model chose for each token of a text. A node replays one to choose its cache policy.

A record is a .npz file in the pack's directory. `experts` is uint16 `[tokens, layers, used]`, with one layer for each
layer that has experts. `of` names the pack and the text.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tpi.errors import ModelError
from tpi.system.arrays import read_arrays, save_arrays

U16 = npt.NDArray[np.uint16]

NAME = "routing.npz"  # in the pack's directory
VERSION = 1
MAX_TOKENS = 16384  # limit of tokens in a record
MAX_SENT_BYTES = 1 << 20  # limit of the bytes sent to a node
_TOLD = 2048  # limit of the tokens sent to a node
_RUNS = 8  # number of stretches of consecutive tokens that a sample is made of
_HEAD = 12  # bytes of the header of a sent sample
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, eq=False)
class RoutingRecord:
    """Experts chosen for each token of a text. `of` identifies the pack and the text that the record belongs to."""

    of: str
    tokens: int  # number of tokens seen; `experts` holds the first of them
    experts: U16

    def extended(self, experts: U16) -> "RoutingRecord":
        """Return a record with the choices of more tokens, `[tokens, layers, used]`, appended up to `MAX_TOKENS`."""
        room = max(0, MAX_TOKENS - len(self.experts))
        kept = np.concatenate([self.experts, experts[:room]]) if self.tokens else experts[:room]
        return RoutingRecord(self.of, self.tokens + len(experts), kept)

    def sample(self) -> U16:
        """Return the sample from which a node chooses its cache policy: all tokens, or 8 evenly spaced stretches.

        The sample has at most 2048 tokens and `MAX_SENT_BYTES` bytes.
        """
        total, each = len(self.experts), max(1, self.experts[:1].size * self._width)
        count = min(_TOLD, (MAX_SENT_BYTES - _HEAD) // each)
        if total <= count:
            return self.experts
        firsts = np.linspace(0, total - count // _RUNS, _RUNS).astype(np.int64)
        return np.concatenate([self.experts[first : first + count // _RUNS] for first in firsts])

    def to_bytes(self) -> bytes:
        """Encode `sample()` for a node: a header, then 1 or 2 bytes for the number of each chosen expert."""
        head = np.array([*self.experts.shape[1:], self._width], "<u4")
        return head.tobytes() + self.sample().astype(f"<u{self._width}").tobytes()

    @property
    def _width(self) -> int:
        """Number of bytes that the number of an expert needs, 1 or 2."""
        return 1 if self.experts.max(initial=0) < 1 << 8 else 2


def from_bytes(data: bytes) -> U16:
    """Decode the bytes of `RoutingRecord.to_bytes` to uint16 `[tokens, layers, used]`.

    Raises:
        ModelError: if the data is damaged.
    """
    if len(data) >= _HEAD:
        layers, used, width = (int(size) for size in np.frombuffer(data[:_HEAD], "<u4"))
        each = width * layers * used
        if width in (1, 2) and each and (len(data) - _HEAD) % each == 0:
            return np.frombuffer(data[_HEAD:], f"<u{width}").reshape(-1, layers, used).astype(np.uint16)
    raise ModelError("a record of chosen experts is damaged; profile the model once more")


def save_routing(path: Path, record: RoutingRecord) -> None:
    """Write a record atomically.

    Raises:
        WeightsError: if the file cannot be written.
    """
    save_arrays(path, of=record.of, numbers=[VERSION, record.tokens], experts=record.experts)


def load_routing(path: Path) -> RoutingRecord:
    """Read a record that `save_routing` wrote.

    Raises:
        ModelError: if the file is damaged.
    """
    with read_arrays(path, _MOST_BYTES, "remove it, and profile the model again") as file:
        of, (version, tokens), experts = str(file["of"]), file["numbers"].tolist(), file["experts"]
        if version != VERSION or experts.dtype != np.uint16 or experts.ndim != 3 or tokens < len(experts):
            raise ValueError("it is not a record of chosen experts, or one of another version of tpi")
    return RoutingRecord(of, tokens, experts)

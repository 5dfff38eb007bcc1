"""Which experts a model's tokens chose over a text: what a node replays to find the policy that suits its cache.

The file is numpy's .npz beside the pack: `experts` uint16 `[tokens, layers, used]`, of the layers that have experts, in
order, and what the record is of.
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
MOST_TOKENS = 16384  # that are kept
MOST_TOLD = 1 << 20  # bytes that a node is told
_TOLD = 2048  # tokens, that a node is told of
_RUNS = 8  # of tokens one after the other, that these are
_HEAD = 12  # bytes before the numbers where it travels
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, eq=False)
class RoutingRecord:
    """`of` names the pack and the text, so that a record goes on with its own alone."""

    of: str
    tokens: int  # that were looked at; the first of them are kept
    experts: U16

    def plus(self, experts: U16) -> "RoutingRecord":
        """With more tokens, `[tokens, layers, used]`."""
        room = max(0, MOST_TOKENS - len(self.experts))
        kept = np.concatenate([self.experts, experts[:room]]) if self.tokens else experts[:room]
        return RoutingRecord(self.of, self.tokens + len(experts), kept)

    def spread(self) -> U16:
        """The tokens of it by which policies are chosen: 2048 in runs that lie evenly over the record, or all."""
        total, each = len(self.experts), max(1, self.experts[:1].size * self._width)
        count = min(_TOLD, (MOST_TOLD - _HEAD) // each)
        if total <= count:
            return self.experts
        firsts = np.linspace(0, total - count // _RUNS, _RUNS).astype(np.int64)
        return np.concatenate([self.experts[first : first + count // _RUNS] for first in firsts])

    def told(self) -> bytes:
        """As nodes are told of it: `spread`, in as few bytes as an expert's number has."""
        head = np.array([*self.experts.shape[1:], self._width], "<u4")
        return head.tobytes() + self.spread().astype(f"<u{self._width}").tobytes()

    @property
    def _width(self) -> int:
        """Bytes of an expert's number."""
        return 1 if self.experts.max(initial=0) < 1 << 8 else 2


def heard(data: bytes) -> U16:
    """`[tokens, layers, used]` from what `RoutingRecord.told` made.

    Raises:
        ModelError: if it is nothing of the kind.
    """
    if len(data) >= _HEAD:
        layers, used, width = (int(size) for size in np.frombuffer(data[:_HEAD], "<u4"))
        each = width * layers * used
        if width in (1, 2) and each and (len(data) - _HEAD) % each == 0:
            return np.frombuffer(data[_HEAD:], f"<u{width}").reshape(-1, layers, used).astype(np.uint16)
    raise ModelError("a record of chosen experts is damaged; profile the model once more")


def save_routing(path: Path, record: RoutingRecord) -> None:
    """Write a record, the file as a whole or not at all.

    Raises:
        WeightsError: if it cannot be written.
    """
    save_arrays(path, of=record.of, numbers=[VERSION, record.tokens], experts=record.experts)


def load_routing(path: Path) -> RoutingRecord:
    """What `save_routing` wrote.

    Raises:
        ModelError: if it is damaged.
    """
    with read_arrays(path, _MOST_BYTES, "remove it, and profile the model again") as file:
        of, (version, tokens), experts = str(file["of"]), file["numbers"].tolist(), file["experts"]
        if version != VERSION or experts.dtype != np.uint16 or experts.ndim != 3 or tokens < len(experts):
            raise ValueError("something else")
    return RoutingRecord(of, tokens, experts)

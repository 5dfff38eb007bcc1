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
MOST_TOKENS = 4096  # that are kept; a node replays far fewer
_HEAD = 8  # bytes before the numbers where it travels
_MOST_BYTES = 64 << 20
_MOST_USES = 4096  # of a layer, that a node is told: it replays them in about a second


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

    def told(self) -> bytes:
        """As nodes are told of it: the first tokens, as many as are replayed in about a second."""
        count = min(len(self.experts), max(1, _MOST_USES // max(1, self.experts.shape[1])))
        return np.array(self.experts.shape[1:], "<u4").tobytes() + self.experts[:count].astype("<u2").tobytes()


def heard(data: bytes) -> U16:
    """`[tokens, layers, used]` from what `RoutingRecord.told` made.

    Raises:
        ModelError: if it is nothing of the kind.
    """
    if len(data) >= _HEAD:
        layers, used = (int(size) for size in np.frombuffer(data[:_HEAD], "<u4"))
        each = 2 * layers * used
        if each and (len(data) - _HEAD) % each == 0:
            return np.frombuffer(data[_HEAD:], "<u2").reshape(-1, layers, used).astype(np.uint16)
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

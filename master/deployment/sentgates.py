"""The least activation with which each neuron is computed, sent to the nodes as one block of vectors per layer."""

from hashlib import sha256
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tpi.net.messages import BlockPlan, GatePlan, VectorPlan
from tpi.partition import FFN_UNIT, Shard
from tpi.sparsity.gates import GateCurves

F32 = npt.NDArray[np.float32]


class SentVectors(Protocol):
    """A source of blocks that are sent to nodes in addition to the pack's, by block id."""

    vectors: dict[bytes, dict[str, F32]]


class SentGates:
    """The least activations of a model's neurons at one error, and the vectors of every block made from them, by id."""

    def __init__(self, curves: GateCurves, error: float) -> None:
        """Compute the thresholds for `error`.

        Raises:
            ModelError: if `error` is not from 0 to 1.
        """
        self.thresholds = curves.at(error)
        self._least = [curve.least(error) for curve in curves.layers]
        self.vectors: dict[bytes, dict[str, F32]] = {}

    def plans(self, shard: Shard, first: int) -> tuple[tuple[BlockPlan, ...], tuple[GatePlan, ...]]:
        """Return the blocks for the node that has `shard`, numbered from `first` on, and the layer of each."""
        blocks: dict[bytes, BlockPlan] = {}
        plans: list[GatePlan] = []
        for layer, whole in enumerate(self._least if len(shard.ffn) else ()):
            begin, end = (min(unit * FFN_UNIT, len(whole)) for unit in (shard.ffn.first, shard.ffn.last))
            block = self._block(np.ascontiguousarray(whole[begin:end]))
            blocks.setdefault(block.id, block)
            plans.append(GatePlan(layer, first + list(blocks).index(block.id)))
        return tuple(blocks.values()), tuple(plans)

    def kept_for(self, nodes: int) -> int:
        """Return the bytes that stay in memory for the other nodes of a group of `nodes`."""
        return sum(least.nbytes for least in self._least) if nodes > 1 else 0

    def _block(self, least: F32) -> BlockPlan:
        content = sha256(least.tobytes()).digest()
        identity = sha256(b"gates" + content).digest()
        self.vectors[identity] = {"least": least}
        return BlockPlan(identity, "ffn", (), (VectorPlan("least", len(least)),), content)

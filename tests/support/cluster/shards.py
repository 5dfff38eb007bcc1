"""A shard cache that is filled from an invented model as a worker fills it, and checks of its contents."""

import numpy as np

from tests.support.cluster.cluster_helpers import MadeUpModel
from tpi.net.messages import Assign, PeerAddress
from tpi.net.transfers import UnitData
from worker.node_plan import node_blocks
from worker.shards.cache import ShardCache
from worker.shards.image import HeldBlock
from worker.shards.partial_image import PartialImage

PEERS = (PeerAddress(0, "master", ""), PeerAddress(1, "a", "tcp://h:1"), PeerAddress(2, "b", "tcp://h:2"))


def plan_of(model: MadeUpModel, rank: int = 1, cut: int = 4) -> Assign:
    return model.split(1, 1, PEERS, cut)[rank]


def fill(cache: ShardCache, model: MadeUpModel, assign: Assign) -> tuple[list[HeldBlock], int]:
    """Fill the cache; return all blocks of `assign`, and the bytes of weights that came from the model."""
    stored = node_blocks(assign)
    found = cache.open(stored)
    sent = 0
    for identity, block in found.items():
        if isinstance(block, PartialImage):
            for need in list(block.needs()):
                data = model.read(need)
                sent += len(data)
                assert not block.accept(UnitData(need.block, need.run, need.first, need.last, data))
            found[identity] = cache.finish(block)
    cache.prune(stored)
    return [held for block in stored if isinstance(held := found[block.id], HeldBlock)], sent


def check(model: MadeUpModel, assign: Assign, held: list[HeldBlock]) -> None:
    """Check that every block has the model's units, back to back from a page boundary, and the model's vectors."""
    for plan, block in zip(assign.blocks, held, strict=True):
        expected = b"".join(
            model.units[plan.id, assign.layouts[run.layout].name][run.first : run.last].tobytes() for run in plan.runs
        )
        data = block.extent.path.read_bytes()
        assert block.extent.offset % 4096 == 0
        assert len(data) % 4096 == 0
        assert data[block.extent.offset :][: block.extent.nbytes] == expected
        np.testing.assert_array_equal(block.vectors["norm"].view(np.uint8), model.units[plan.id, "vectors"][0])

"""Shared helpers for tests of groups that compute batches; each node has an accelerator of its own or none."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from master.deployment.deployment import Deployment
from tests.support.cluster.inprocess import ThreadedWorkers, in_process_deployment
from tests.support.devices.offloading import answers, offloaded, weights_bytes
from tpi.devices.base import Device
from tpi.devices.choose import open_device
from tpi.devices.options import OffloadOptions
from tpi.net.fields import GroupBatch
from tpi.pack.reader import Pack
from worker.node.node import Node

SMALL: dict[str, Any] = {"context": 64, "pool": 96, "chunk": 32}  # tokens, pages
BATCH = OffloadOptions(pipeline="batch")
GroupCase = tuple[Sequence[float], Mapping[int, int], GroupBatch]
"""Shares, MiB of the accelerators by rank beside a share of the weights, and what all have alike."""
CASES: dict[str, GroupCase] = {
    "two alike": ((1, 1), {0: 3, 1: 3}, GroupBatch(12, 6, True, 32)),
    "three, uneven": ((3, 1, 2), {0: 2, 1: 3, 2: 6}, GroupBatch(12, 4, True, 16)),
    "one without": ((1, 2), {1: 3}, GroupBatch(12, 5, True, 8)),
    "a worker without": ((2, 1, 1), {0: 3, 2: 9}, GroupBatch(12, 3, False, 32)),
    "one with nothing": ((1, 0, 1), {0: 3, 1: 3, 2: 3}, GroupBatch(8, 1, True, 32)),
}


@contextmanager
def grouped(
    pack: Pack, cache: Path, case: GroupCase, options: OffloadOptions = BATCH, **more: Any
) -> Iterator[tuple[Deployment, list[Node]]]:
    """Run a group that computes batches; yield the deployment and its nodes."""
    shares, rooms, together = case
    with ExitStack() as stack:
        cards: dict[int, Device] = {
            rank: stack.enter_context(closing(open_device("emu:1GiB,stretch=1", _room(pack, shares, rank, room))))
            for rank, room in rooms.items()
        }
        deployment = stack.enter_context(
            offloaded(pack, cache, cards, options, shares, batch=together, **(SMALL | more))
        )
        workers = deployment._workers
        assert isinstance(workers, ThreadedWorkers)
        yield deployment, [deployment.node, *workers.nodes]


def _room(pack: Pack, shares: Sequence[float], rank: int, room: int) -> int:
    return int(0.4 * shares[rank] / sum(shares) * weights_bytes(pack)) + (room << 20)


def alone(pack: Pack, cache: Path, asked: list[list[int]]) -> list[list[int]]:
    """Return the answer to each request, computed alone on the host of one node."""
    with closing(in_process_deployment(pack, [1], cache / "host", **SMALL)) as deployment:
        return [answer for prompt in asked for answer in answers(deployment, [prompt])]

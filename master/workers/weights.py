"""The master's side of the weights plane: it sends workers the units that they lack, and reads rank 0's own units."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from master.workers.predictors import PredictorSource
from scheduler.storage.extent import Extent
from tpi.errors import TpiError, WeightsError
from tpi.net.channel import Channel, UnreachableError
from tpi.net.fields import TRANSFER_BYTES
from tpi.net.messages import Assign
from tpi.net.monitor import Monitor
from tpi.net.transfers import Missing, Need, Offer, Unavailable, UnitData
from tpi.pack.reader import Bytes, Pack, PackBlock
from tpi.partition import Range
from tpi.progress import Progress, silent
from tpi.text import SENTENCE_CHARACTERS, plain
from worker.node_plan import NodeBlock, node_blocks
from worker.shards.cache import ShardCache
from worker.shards.image import HeldBlock, Piece, image_bytes, image_pieces, image_token
from worker.shards.partial_image import PartialImage

F32 = npt.NDArray[np.float32]
Allowed = dict[tuple[bytes, str], list[Range]]
"""The ranges of units of each run of a block, by (block id, run name), that a worker may ask for."""
_WRONG = "a unit does not match its hash"
_MOST_TIMES = 8  # a worker is sent its part at most this many times, because of damage and broken connections
_EARLIER = 8  # number of earlier plans whose requests may still arrive


class UnitSource(Protocol):
    """A source of the units that workers request."""

    def read(self, need: Need) -> memoryview:
        """Return the bytes of the request `need`.

        Raises:
            WeightsError: if the source does not have the units.
        """


class PackSource:
    """The layers of a pack, and predictors for workers; never the pack's embedding, head or final norm."""

    def __init__(self, pack: Pack, sent: PredictorSource | None = None) -> None:
        self._sent = sent.vectors if sent is not None else {}
        self.blocks: Mapping[bytes, PackBlock] = {bytes.fromhex(block.id): block for block in pack.walk()}
        self._verifiers: dict[tuple[bytes, str], Callable[[int, Bytes], None]] = {}

    def read(self, need: Need) -> memoryview:
        """Return the bytes of the request `need`, after a check of its units against their hashes.

        Raises:
            WeightsError: if the pack does not have the units, or the units are damaged.
        """
        block = self.blocks.get(need.block)
        if need.run == "vectors" and need.block in self._sent:
            return memoryview(b"".join(values.tobytes() for values in self._sent[need.block].values()))
        if block is None:
            raise WeightsError("this model has no such layer block")
        if need.run == "vectors":
            return memoryview(vectors_bytes(block))
        if need.run not in (run.name for run in block.shape.runs):
            raise WeightsError(f"the block has no run {need.run!r}")
        units = block.read_units(need.run, need.first, need.last)
        self._verifier(block, need)(need.first, units)  # damage is found here, before the receiver finds it
        return units.data.cast("B")

    def _verifier(self, block: PackBlock, need: Need) -> Callable[[int, Bytes], None]:
        key = (need.block, str(need.run))
        if key not in self._verifiers:
            self._verifiers[key] = block.verifier(key[1])
        return self._verifiers[key]


@dataclass
class TransferStats:
    """The bytes that one worker lacks for the current plan, as it reported, and the bytes sent."""

    missing: int = 0
    sent: int = 0


class WeightServer:
    """The master's server of units to one worker. It sends only units of the worker's own plan."""

    def __init__(self, channel: Channel, monitor: Monitor, session: int) -> None:
        self.channel = channel
        self.monitor = monitor
        self.stats = TransferStats()
        self.session = session
        self._assign: Assign | None = None
        self._source: UnitSource | None = None
        self._allowed: Allowed = {}
        self._over: deque[Allowed] = deque(maxlen=_EARLIER)  # units that earlier plans allowed
        self._unit_bytes: dict[tuple[bytes, str], int] = {}
        self._nbytes = 0  # size of the worker's part of the current plan

    def begin(self, assign: Assign, source: UnitSource) -> None:
        """Serve the units that `assign` lists, from `source`, from now on."""
        self.stats = TransferStats()
        self._over.append(self._allowed)
        self._assign, self._source = assign, source
        self._allowed = {(block.id, "vectors"): [Range(0, 1)] for block in assign.blocks}
        for block in assign.blocks:
            for run in block.runs:
                layout = assign.layouts[run.layout]
                self._allowed.setdefault((block.id, layout.name), []).append(Range(run.first, run.last))
                self._unit_bytes[block.id, layout.name] = layout.unit_bytes
        self._nbytes = sum(map(image_bytes, node_blocks(assign)))

    def serve(self) -> None:
        """Answer the messages that have arrived, without blocking for long.

        Raises:
            WeightsError: if the worker has been sent its part `_MOST_TIMES` times, and still asks.
        """
        for connected in self.monitor.changes():
            if connected:
                self._send(Offer(self.session))
        for _, message in self.channel.receive_batch():
            if isinstance(message, Missing) and self._assign and message.epoch == self._assign.epoch:
                self.stats.missing = min(message.nbytes, self._nbytes)
            elif isinstance(message, Need) and not self._late(message):
                self._answer(message)

    def close(self) -> None:
        """Close the monitor and the connection to the worker."""
        self.monitor.close()
        self.channel.close()

    def _late(self, need: Need) -> bool:
        """Return True if an earlier plan allows the request `need` and the current plan does not.

        The worker then sent the request before it received the current plan.
        """
        return not _within(self._allowed, need) and any(_within(earlier, need) for earlier in self._over)

    def _answer(self, need: Need) -> None:
        try:
            if self._source is None or not _within(self._allowed, need):
                raise WeightsError("it is not in the worker's plan")
            size = (need.last - need.first) * self._unit_bytes.get((need.block, need.run), 0)
            if size > TRANSFER_BYTES and need.last - need.first > 1:
                raise WeightsError(f"{size} bytes at once are over the limit of {TRANSFER_BYTES}")
            data = self._source.read(need)
        except TpiError as error:
            self._send(Unavailable(need.block, plain(str(error), SENTENCE_CHARACTERS)))
            return
        if self.stats.sent > _MOST_TIMES * self._nbytes:
            raise WeightsError("asks for its weights again and again; check its disk and network, or leave it out")
        self.stats.sent += len(data)
        self._send(UnitData(need.block, need.run, need.first, need.last, data))

    def _send(self, message: object) -> None:
        try:
            self.channel.send(message)
        except UnreachableError:
            return  # the connection broke; after the next Offer the worker asks again


def _within(allowed: Allowed, need: Need) -> bool:
    parts = allowed.get((need.block, need.run), [])
    return any(part.first <= need.first < need.last <= part.last for part in parts)


def own_blocks(
    pack: Pack,
    assign: Assign,
    cache: ShardCache,
    progress: Progress = silent,
    sent: PredictorSource | None = None,
) -> list[HeldBlock]:
    """Return rank 0's blocks in the order of `assign.blocks`.

    A block whose units are one byte range of the pack is used in place; other blocks become images in the cache.
    The predictors in `sent` are used directly from memory.

    Raises:
        WeightsError: if the pack is damaged, or the disk is full.
    """
    source, ready = PackSource(pack), sent.vectors if sent is not None else {}
    stored = node_blocks(assign)
    found = {block.id: HeldBlock(Extent(pack.path, 0, 0), ready[block.id]) for block in stored if block.id in ready}
    for block in stored:
        if block.id not in found and (held := _in_place(block, source.blocks[block.id], cache)):
            found[block.id] = held
    copied = [block for block in stored if block.id not in found]
    for done, (identity, image) in enumerate(cache.open(copied, progress, pack.path.name).items()):
        progress(done, len(copied))
        found[identity] = _filled(image, source, cache) if isinstance(image, PartialImage) else image
    cache.prune(copied)
    return [found[block.id] for block in stored]


def _filled(partial: PartialImage, source: PackSource, cache: ShardCache) -> HeldBlock:
    for need in list(partial.needs()):
        if partial.accept(UnitData(need.block, need.run, need.first, need.last, source.read(need))):
            raise source.blocks[need.block].damaged(_WRONG)
    return cache.finish(partial)


def _in_place(own: NodeBlock, block: PackBlock, cache: ShardCache) -> HeldBlock | None:
    """Return the block in place in the pack, with its units checked; None if its units are not one byte range."""
    ranges = [(block.offset(run.name, run.units.first), run.nbytes) for run in own.runs if run.nbytes]
    if not ranges or any(offset + nbytes != after for (offset, nbytes), (after, _) in pairwise(ranges)):
        return None
    if not cache.is_intact(block.path, _pieces_in_pack(own, block), image_token(own)):
        raise block.damaged(_WRONG)
    extent = Extent(block.path, ranges[0][0], own.nbytes)
    return HeldBlock(extent, block.vectors(), remedy="start again to have it made anew")


def _pieces_in_pack(own: NodeBlock, block: PackBlock) -> Sequence[Piece]:
    units = [piece for piece in image_pieces(own) if piece.run != "vectors"]
    offsets = [block.offset(piece.run, piece.unit) for piece in units]
    return [replace(piece, offset=offset) for piece, offset in zip(units, offsets, strict=True)]


def vectors_bytes(block: PackBlock) -> bytes:
    """Return the vectors of a block back to back, in the order of its shape."""
    vectors = block.vectors()
    return b"".join(vectors[name].tobytes() for name, _ in block.shape.vectors)

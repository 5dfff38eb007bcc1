"""The plan of a node with accelerators: resident pieces, streamed pieces, and KV pages (PIPO, section 3.5).

Resident pieces stay in an accelerator's memory and are always computed there. The others lie in the host's memory or
on its disk. A step either streams them to the accelerator, one after the other, or computes them on the host. Long
and short steps may differ in this. Each mode of `worker.plan.modes` that uses accelerators makes such a plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import le

from scheduler.model.offload.problem import Problem
from scheduler.model.offload.work import KvTier, Offload
from scheduler.model.placement import Placement
from scheduler.model.ring import Ring, smallest, with_lags
from scheduler.transfer.merge import merge_rings
from tpi.devices.arena import cuts_between
from tpi.devices.pages import round_up
from tpi.errors import PlanError
from worker.plan.segments import NodeSegment

_DEEPEST = 4  # the most segments in a ring: more would not even out the sizes any further
Numbers = frozenset[int]


@dataclass(frozen=True)
class MemoryRule:
    """A rule that says where the weights that are not resident on an accelerator must lie, and why.

    Attributes:
        in_ram: True: all in memory; False: all on disk; None: in memory while they fit.
        reason: the beginning of a sentence that says why they must be in memory.
        way_out: advice to the user if the weights do not fit.
    """

    in_ram: bool | None = None
    reason: str = ""
    way_out: str = ""

    @classmethod
    def of(cls, weights: str) -> "MemoryRule":
        """Return the rule for a value of `--weights`: "auto", "gpu", "ram" or "disk"."""
        if weights == "ram":
            return cls(True, "--weights ram needs all weights in memory", "use --weights auto")
        return cls(False if weights == "disk" else None)


@dataclass(frozen=True)
class OffloadPlan:
    """The division of a node's work between the host and its accelerators.

    The number of a piece is its index in `pieces`. Each piece is assigned to the accelerator `piece.device`: it is
    resident there, is streamed through that accelerator's ring, or is computed by the host instead. A layer's keys and
    values lie on the accelerator of its attention, or in the host's memory.

    Attributes:
        pieces: all pieces of the node, in order of use.
        resident: numbers of the pieces that are resident on their accelerator.
        long: numbers of the other pieces that steps of at least `crossover` tokens stream to the accelerator.
        short: numbers of the other pieces that shorter steps stream to the accelerator.
        crossover: the number of tokens from which a step counts as long.
        kv: where keys and values lie; "ram" if the host's memory has those of any head.
        depth: segments in a ring at once, and layers whose KV pages visit the accelerator at once.
        kv_layer_bytes: bytes of one layer's KV pages on the accelerator.
        problem: the input of the cost model.
        chosen: the choice of the cost model.
        longest: tokens of the longest step that fits on the accelerators.
        ring_depth: segments in a ring at once, if more than `depth`.
        chunked: True for a plan for batches, whose streamed pieces are chunks of a layer. One call then computes all
            chunks of a block of experts, wherever they lie. Layers lie in the two halves of the ring in turn. KV pages
            visit the accelerator by micro-batch, not by layer.
        host_kv_heads: KV heads per layer with keys and values in the host's memory; None means all.
        staged_bytes: bytes of host memory that collect keys and values on their way to or from the accelerator.
        other_bytes: bytes on the first accelerator for the mode's own memory, such as slots of experts.
        memory: where the pieces that are not resident must lie.
        head_bytes: bytes of the head's table on the first accelerator, which then computes the head; 0: the host does.
    """

    pieces: tuple[NodeSegment, ...]
    resident: Numbers
    long: Numbers
    short: Numbers
    crossover: int
    kv: KvTier
    depth: int
    kv_layer_bytes: int
    problem: Problem
    chosen: Offload
    longest: int
    ring_depth: int = 0
    chunked: bool = False
    host_kv_heads: int | None = None
    staged_bytes: int = 0
    other_bytes: int = 0
    memory: MemoryRule = MemoryRule()
    head_bytes: int = 0

    def piece_name(self, piece: int) -> str:
        """Return the name of a streamed piece for traces and errors.

        The name includes the number of the chunk if the block has several.
        """
        block = self.pieces[piece].block
        if not self.chunked:
            return block.name
        number = self._chunk_numbers[piece]
        alone = number == 1 and all(other.block is not block for other in self.pieces[piece + 1 : piece + 2])
        return block.name if alone else f"{block.name}, chunk {number}"

    @property
    def host_pieces(self) -> list[int]:
        """The numbers of the pieces that lie in the host's memory or on its disk, in order of use."""
        return [number for number in range(len(self.pieces)) if number not in self.resident]

    @property
    def streamed_pieces(self) -> list[int]:
        """The numbers of the pieces that long or short steps stream through a ring, in order of use."""
        return sorted(self.long | self.short)

    @property
    def cards(self) -> range:
        """The numbers of the accelerators among the node's devices, from 1 on."""
        return range(1, 1 + max((piece.device for piece in self.pieces), default=1))

    def pieces_on(self, card: int) -> Numbers:
        """Return the numbers of the pieces that are assigned to accelerator `card`."""
        return frozenset(number for number, piece in enumerate(self.pieces) if piece.device == card)

    def ring(self, numbers: Numbers) -> Ring:
        """Return one ring that streams the pieces `numbers`: the rings of all accelerators, merged.

        The ring numbers its blocks as the pieces are numbered.
        """
        if self.chunked and numbers:
            return self._ring_of_halves()
        sizes = [piece_bytes(piece) for piece in self.pieces]
        depth = self.ring_depth or self.depth
        return merge_rings(
            [smallest(sorted(numbers & self.pieces_on(card)), sizes, depth) for card in self.cards], sizes
        )

    def ring_bytes(self, card: int) -> int:
        """Return the bytes of accelerator `card`'s ring: long and short steps use the same memory in turn."""
        if self.chunked:
            return 2 * self.layer_bytes
        return max(self.ring(streamed & self.pieces_on(card)).size for streamed in (self.long, self.short))

    def ring_cuts(self, card: int) -> list[int]:
        """Return the offsets at which accelerator `card`'s ring may be divided without cutting a piece in two."""
        if self.chunked:  # the ring's memory is allocated in one piece
            return []
        mine = self.pieces_on(card)
        rings = [self.ring(streamed & pieces) for streamed in (self.long, self.short) for pieces in (mine, streamed)]
        return cuts_between(
            (offset, offset + piece_bytes(self.pieces[piece]))
            for ring in rings
            for piece, offset in zip(ring.blocks, ring.offsets, strict=True)
            if piece in mine
        )

    def deepened(self, rooms: Sequence[int]) -> "OffloadPlan":
        """Return the plan with the longest rings that fit, of at most 4 segments.

        The longer a ring, the less it matters that pieces have different sizes.

        Args:
            rooms: bytes of memory that rings may take on each accelerator.
        """
        if self.depth == 1 or not self.streamed_pieces:
            return self
        deeper = (replace(self, ring_depth=ahead) for ahead in range(_DEEPEST, self.depth, -1))
        return next((plan for plan in deeper if all(map(le, plan.card_bytes, rooms))), self)

    @property
    def layers(self) -> list[int]:
        """The numbers of the layers with attention, in order of use."""
        return list(dict.fromkeys(piece.block.layer for piece in self.pieces if piece.block.kind == "attention"))

    def layers_on(self, card: int) -> list[int]:
        """Return the layers whose attention, and so their keys and values, are assigned to accelerator `card`."""
        mine = {self.pieces[number].block.layer for number in self.pieces_on(card) if self._attends(number)}
        return [layer for layer in self.layers if layer in mine]

    @property
    def visiting_layers(self) -> list[int]:
        """The layers whose attention an accelerator computes while their keys and values lie in the host's memory."""
        if self.chunked or self.kv != "ram":
            return []
        computed = self.resident | self.long | self.short
        attending = {self.pieces[number].block.layer for number in computed if self._attends(number)}
        return [layer for layer in self.layers if layer in attending]

    def visiting_layers_on(self, card: int) -> list[int]:
        """Return the layers among `visiting_layers` whose attention is assigned to accelerator `card`."""
        mine = set(self.layers_on(card))
        return [layer for layer in self.visiting_layers if layer in mine]

    def visiting_at_once(self, card: int) -> int:
        """Return the number of layers whose KV pages visit accelerator `card` at once."""
        return min(self.depth, len(self.visiting_layers_on(card)))

    @property
    def host_kv_layers(self) -> list[int]:
        """The layers whose keys and values lie in the host's memory."""
        return self.layers if self.kv == "ram" else []

    @property
    def memory_bytes(self) -> int:
        """Bytes that the plan takes on all accelerators together, without the buffers of kernels."""
        return sum(self.card_bytes)

    @property
    def shared_bytes(self) -> int:
        """Bytes of host memory that accelerators without memory of their own take, including kernels' buffers."""
        cards = self.problem.machine.cards
        buffers = self.problem.needs.card_need.nbytes(self.problem.tokens)
        taken = [(card, size) for card, size in zip(cards, self.card_bytes, strict=False) if card.shared and size]
        return sum(size + buffers for _, size in taken)

    @property
    def card_bytes(self) -> list[int]:
        """Bytes that the plan takes on each accelerator, without the buffers of kernels."""
        first, *more = (self._bytes_on(card) for card in self.cards)
        return [first + self.other_bytes + self.head_bytes, *more]

    def _bytes_on(self, card: int) -> int:
        kept = sum(piece_bytes(self.pieces[number]) for number in self.resident & self.pieces_on(card))
        layers = len(self.layers_on(card)) if self.kv == "gpu" else self.visiting_at_once(card)
        return kept + self.ring_bytes(card) + layers * self.kv_layer_bytes

    def host_placement(self, sizes: Sequence[int], fitting: Placement) -> Placement:
        """Return the placement of the pieces `host_pieces` in the host's memory, as `memory` says.

        Args:
            sizes: bytes of each piece of `host_pieces`.
            fitting: the placement that keeps as many of these pieces resident as fit.

        Raises:
            PlanError: if all pieces must be in memory and do not fit.
        """
        rule = self.memory
        if rule.in_ram and fitting.streamed_bytes:
            short = -(-fitting.streamed_bytes >> 20)
            raise PlanError(f"{rule.reason}, and {short}MiB of them do not fit; {rule.way_out}")
        if rule.in_ram is not False or not sizes:
            return fitting
        rings = [smallest(range(len(sizes)), sizes, depth) for depth in (2, 1)]
        ring = next((ring for ring in rings if ring.size <= fitting.memory_bytes), rings[-1])
        return Placement(tuple(sizes), frozenset(), ring)

    def adapted_to(self, host: Placement) -> "OffloadPlan":
        """Return the plan adapted to `host`, the placement of the pieces `host_pieces` in the host's memory.

        The disk is read in a fixed order. So if some of these pieces are read from disk, a step that streams any of
        them to the accelerator must stream all.
        """
        if not host.streamed_bytes:
            return self
        every = frozenset(self.host_pieces)
        return replace(self, long=every if self.long else self.long, short=every if self.short else self.short)

    @property
    def layer_bytes(self) -> int:
        """Bytes of the streamed chunks of the largest layer."""
        return max((round_up(self._slots(layer)[-1].stop) for layer in self._passing), default=0)

    def _ring_of_halves(self) -> Ring:
        """Return the ring for all streamed pieces: layers lie in its two halves in turn.

        If the number of layers is odd, a cycle of the ring passes all layers twice, so that halves still alternate.
        """
        layers = self._passing * (1 + len(self._passing) % 2)
        uses = [piece for layer in layers for piece in layer]
        offsets = [
            turn % 2 * self.layer_bytes + slot.start for turn, layer in enumerate(layers) for slot in self._slots(layer)
        ]
        return with_lags(uses, [piece.nbytes for piece in self.pieces], 2 * self.layer_bytes, offsets)

    def _slots(self, layer: Sequence[int]) -> list[slice]:
        """Return the byte range of each piece of a layer in its half of the ring.

        Each block starts on a page of memory, and its chunks lie back to back.
        """
        slots, before = list[slice](), None
        for piece in (self.pieces[number] for number in layer):
            end = slots[-1].stop if slots else 0
            begin = end if piece.block is before else round_up(end)
            slots.append(slice(begin, begin + piece.nbytes))
            before = piece.block
        return slots

    @cached_property
    def _chunk_numbers(self) -> dict[int, int]:
        """The position of each streamed piece among the streamed pieces of its block, from 1 on."""
        found, counts = dict[int, int](), dict[int, int]()
        for piece in self.streamed_pieces:
            block = self.pieces[piece].block.number
            found[piece] = counts[block] = counts.get(block, 0) + 1
        return found

    @cached_property
    def _passing(self) -> list[list[int]]:
        """Numbers of the streamed pieces of each layer that has any."""
        found: dict[int, list[int]] = {}
        for piece in self.streamed_pieces:
            found.setdefault(self.pieces[piece].block.layer, []).append(piece)
        return list(found.values())

    def _attends(self, number: int) -> bool:
        return self.pieces[number].block.kind == "attention"


def piece_bytes(piece: NodeSegment) -> int:
    """Return the bytes of an accelerator's memory that a piece takes: whole pages of memory."""
    return round_up(piece.nbytes)

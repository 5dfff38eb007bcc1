"""The most memory that a node takes on the accelerator and on the host, calculated before anything is allocated.

PIPO's appendix B, for what this runtime allocates:

| the paper                   | this runtime                                                                     |
|-----------------------------|----------------------------------------------------------------------------------|
| W_mha + W_mlp, preloading   | the largest two neighbours among the streamed segments                           |
| W_mha or W_mlp, without     | the largest streamed segment                                                     |
| 2C/l decoding, C/l without  | one layer's pages for each slot, if they are in RAM and the accelerator attends  |
| pbs(5d + hs), pbs(3d_h + 2d)| `tpi.kernels.memory.card_memory_need` for a chunk, in place of scores of s^2     |
| W_embed, pbsV               | nothing: tables are on the host, with one row of logits per sequence             |

Resident segments take memory in addition. Slots and pages are allocated once, so a node takes the larger of both
phases.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scheduler.model.machine import NodeMachine
from scheduler.model.offload.timeline import ACCELERATOR_SLOTS, HOST_SLOTS
from scheduler.model.offload.work import NodeWork, Offload, RequestPhase, Workload, kv_pages
from scheduler.model.ring import neighbours
from scheduler.model.sizes import LONGEST_CHUNK, TILE
from tpi.kernels.memory import CardMemoryNeed

_CHUNK_SHARE = 8  # a chunk's activations take at most one eighth of either memory


@dataclass(frozen=True)
class Needs:
    """Memory needs of a node in addition to weights, keys and values; bytes."""

    token: int  # activations of one token of a step (`worker.plan.fit.token_bytes`)
    fixed: int = 0  # on the host, whatever is placed: the process, vectors, tables' rows, sampling
    card: CardMemoryNeed | None = None  # on an accelerator; None: as much for a token as on the host

    @property
    def card_need(self) -> CardMemoryNeed:
        """The memory needs of an accelerator's kernels: `card` or, if that is None, `token` bytes for each token."""
        return self.card or CardMemoryNeed(self.token)


@dataclass(frozen=True)
class MemoryParts:
    """Bytes of one memory by purpose."""

    weights: int = 0
    slots: int = 0  # slots for streamed segments, or for pieces of them
    kv: int = 0
    activations: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """Number of bytes for all purposes together."""
        return self.weights + self.slots + self.kv + self.activations + self.other


@dataclass(frozen=True)
class Peaks:
    """The most that a node takes of each memory; bytes."""

    accelerator: MemoryParts
    host: MemoryParts
    more: tuple[MemoryParts, ...] = ()  # the other accelerators that segments are dealt to

    @property
    def cards(self) -> tuple[MemoryParts, ...]:
        """The peaks of all accelerators, the first one's first."""
        return self.accelerator, *self.more


def head_tiles(work: NodeWork) -> int:
    """Return the bytes that a head takes in memory at once if it is read from disk."""
    return min(2 * TILE, work.head.nbytes)


def chunk_tokens(machine: NodeMachine, request: Workload, needs: Needs, longest: int = LONGEST_CHUNK) -> int:
    """Return the tokens of a prompt step: at most `longest`, halved until its activations fit.

    They may take an eighth of the host's memory, and an eighth of the smallest accelerator's.
    """
    least = min((card.memory for card in machine.cards), default=machine.memory)
    chunk = min(longest, request.prompt * request.sequences)
    while chunk > 1 and not (
        chunk * needs.token <= machine.memory // _CHUNK_SHARE and chunk * needs.card_need.token <= least // _CHUNK_SHARE
    ):
        chunk //= 2
    return chunk


def peaks(work: NodeWork, offload: Offload, request: Workload, needs: Needs, chunk: int) -> Peaks:
    """Return the most that a node takes of each memory if prompts come in steps of `chunk` tokens."""
    tokens = max(chunk, request.sequences)
    sizes = [segment.nbytes for segment in work.segments]
    from_disk = [size for size, tier in zip(sizes, offload.residence, strict=True) if tier == "disk"]
    head = head_tiles(work) if offload.head == "disk" else work.head.nbytes
    host = MemoryParts(
        weights=_stored_bytes(work, offload, "ram"),
        slots=_slots(from_disk, HOST_SLOTS[offload.pipeline]),
        kv=kv_pages(work, request) if offload.kv == "ram" else 0,
        activations=tokens * needs.token,
        other=needs.fixed + head,
    )
    first, *more = (
        _accelerator(work, offload, request, needs, tokens, card) for card in range(1 + max(offload.cards, default=0))
    )
    if offload.head == "gpu":
        first = replace(first, other=first.other + work.head.nbytes)
    return Peaks(first, host, tuple(more))


def _accelerator(
    work: NodeWork, offload: Offload, request: Workload, needs: Needs, tokens: int, card: int
) -> MemoryParts:
    prompt = _phase_parts(work, offload, request, needs, tokens, "prompt", card)
    decode = _phase_parts(work, offload, request, needs, request.sequences, "decode", card)
    return MemoryParts(
        weights=prompt.weights,
        slots=max(prompt.slots, decode.slots),
        kv=max(prompt.kv, decode.kv),
        activations=max(prompt.activations, decode.activations),
        other=max(prompt.other, decode.other),
    )


def _phase_parts(
    work: NodeWork, offload: Offload, request: Workload, needs: Needs, tokens: int, phase: RequestPhase, card: int
) -> MemoryParts:
    dealt = _dealt_to(offload, card)
    there = [place == "accelerator" and mine for place, mine in zip(offload.places(phase), dealt, strict=True)]
    mine = _only_dealt(work, dealt)
    kv = kv_pages(mine, request) if offload.kv == "gpu" else _kv_slots(mine, offload, request, there)
    return MemoryParts(
        weights=_stored_bytes(mine, offload, "gpu"),
        slots=_slots(_streamed_sizes(work, offload, phase, card), offload.slots or ACCELERATOR_SLOTS[offload.pipeline]),
        kv=kv,
        activations=needs.card_need.nbytes(tokens) - needs.card_need.fixed if any(there) else 0,
        other=needs.card_need.fixed if any(there) else 0,
    )


def _kv_slots(work: NodeWork, offload: Offload, request: Workload, there: Sequence[bool]) -> int:
    """Return the bytes on the accelerator for keys and values that are copied from RAM: one layer's pages per slot."""
    used = zip(work.segments, there, strict=True)
    attending = [segment.kv_token for segment, computed in used if computed and segment.kv_token]
    share = _slots(attending, ACCELERATOR_SLOTS[offload.pipeline]) / max(work.kv_token, 1)
    return round(kv_pages(work, request) * share)


def _streamed_sizes(work: NodeWork, offload: Offload, phase: RequestPhase, card: int) -> list[int]:
    """Return the bytes of each segment that is copied to an accelerator, in the order of use."""
    found = zip(work.segments, offload.residence, offload.places(phase), _dealt_to(offload, card), strict=True)
    return [segment.nbytes for segment, tier, place, mine in found if mine and place == "accelerator" and tier != "gpu"]


def _dealt_to(offload: Offload, card: int) -> list[bool]:
    return [number == card for number in offload.cards or (0,) * len(offload.residence)]


def _only_dealt(work: NodeWork, dealt: Sequence[bool]) -> NodeWork:
    """Return `work` with 0 bytes for each segment that is not in `dealt`, so that segments keep their numbers."""
    pairs = zip(work.segments, dealt, strict=True)
    return replace(work, segments=tuple(each if mine else replace(each, nbytes=0, kv_token=0) for each, mine in pairs))


def _stored_bytes(work: NodeWork, offload: Offload, where: str) -> int:
    return sum(segment.nbytes for segment, tier in zip(work.segments, offload.residence, strict=True) if tier == where)


def _slots(sizes: Sequence[int], count: int) -> int:
    return neighbours(sizes, count) if sizes else 0

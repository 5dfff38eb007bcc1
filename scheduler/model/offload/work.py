"""The work of a node in a step, segment by segment, and where each segment may be stored and computed.

Time is not modelled here.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from tpi.kernels.constants import PAGE_TOKENS
from tpi.pack.layout import BlockKind

Tier = Literal["gpu", "ram", "disk"]  # where a segment is stored: the accelerator's memory, the host's, or the disk
Place = Literal["host", "accelerator"]  # where it is computed
KvTier = Literal["gpu", "ram"]
Pipeline = Literal["performance", "memory"]
RequestPhase = Literal["prompt", "decode"]  # the two kinds of step that a request is made of

TIERS: tuple[Tier, ...] = ("gpu", "ram", "disk")
PLACES: tuple[Place, ...] = ("host", "accelerator")
KV_TIERS: tuple[KvTier, ...] = ("gpu", "ram")
Cards = tuple[int, ...]
"""The node's accelerator, numbered from 0, that each segment is dealt to; empty: the first for all."""

REQUEST_PHASES: tuple[RequestPhase, RequestPhase] = ("prompt", "decode")
PIPELINES: tuple[Pipeline, ...] = ("performance", "memory")
VALUE = 4  # bytes of an activation


@dataclass(frozen=True)
class SegmentWork:
    """One segment: its weights and, for attention, the keys and values of one token."""

    block: int  # the number of its block, in order of use
    kind: BlockKind
    nbytes: int  # bytes of its weights
    weights: int  # number of its weights: each is multiplied and added once per token
    kv_token: int = 0  # bytes of the keys and values that one token adds
    pair: int = 0  # operations of one token with one token that it attends to
    window: int = 0  # the most tokens that a token attends to; 0: all
    routed: int = 0  # bytes of its weights that belong to routed experts
    chosen: float = 1.0  # share of the routed experts that one token uses

    def touched(self, tokens: float) -> float:
        """Return the bytes of weights that `tokens` tokens read together, if each chooses its experts at random."""
        return self.nbytes - self.routed * float((1 - self.chosen) ** tokens)

    @property
    def passed(self) -> float:
        """Number of weights that one token is multiplied with."""
        return self.weights * self.touched(1) / max(1, self.nbytes)


@dataclass(frozen=True)
class TableWork:
    """The head, which is multiplied with one hidden state per sequence; 0 bytes on a node without one."""

    nbytes: int = 0
    weights: int = 0


@dataclass(frozen=True)
class NodeWork:
    """All segments of a node in the order of use, its head, and the bytes of a token that cross to an accelerator."""

    segments: tuple[SegmentWork, ...]
    crossing: int  # bytes of one token's hidden states, one way
    head: TableWork = TableWork()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights of all segments."""
        return sum(segment.nbytes for segment in self.segments)

    def touched(self, tokens: float) -> float:
        """Return the bytes of weights, the head's included, that a step of `tokens` tokens reads."""
        return self.head.nbytes + sum(segment.touched(tokens) for segment in self.segments)

    @property
    def kv_token(self) -> int:
        """Bytes of the keys and values of one token, in all layers."""
        return sum(segment.kv_token for segment in self.segments)

    @property
    def blocks(self) -> list[range]:
        """The indices of each block's segments, block by block."""
        found = (list(same) for _, same in groupby(range(len(self.segments)), lambda at: self.segments[at].block))
        return [range(numbers[0], numbers[-1] + 1) for numbers in found]


@dataclass(frozen=True)
class StepSize:
    """The size of a step, as a mean over many steps.

    It computes `tokens` tokens, of all `sequences` sequences together. After it, each sequence has `context` tokens.
    """

    tokens: float
    sequences: int = 1
    context: float = 1

    @property
    def cached(self) -> float:
        """Tokens that each sequence had before the step."""
        return self.context - self.tokens / self.sequences

    @property
    def attended(self) -> float:
        """Mean number of tokens that a token attends to: the tokens before it, and itself."""
        return (self.cached + 1 + self.context) / 2


@dataclass(frozen=True)
class Workload:
    """The request that a node is planned for: its sequences, and the prompt, answer and context tokens of each."""

    prompt: int = 512
    answer: int = 128
    sequences: int = 1
    context: int = 4096


@dataclass(frozen=True)
class Offload:
    """A configuration: where each segment is stored and computed, where keys and values are, and the pipeline.

    Segments in the accelerator's memory are computed there. All keys and values are where `kv` says. From RAM they are
    copied to the accelerator before it attends, and new ones are copied back afterwards; if they are in the
    accelerator's memory, attention is computed only there. With several accelerators, a segment and its keys and values
    belong to the accelerator that the segment is dealt to.
    """

    residence: tuple[Tier, ...]
    prompt: tuple[Place, ...]
    decode: tuple[Place, ...]
    kv: KvTier
    pipeline: Pipeline
    head: Tier = "ram"  # where the head's table is; "gpu": in RAM, too, and the accelerator computes the head
    slots: int = 0  # slots for streamed segments on the accelerator; 0: as few as the pipeline needs
    cards: Cards = ()

    @property
    def on_card(self) -> bool:
        """True if all weights, keys and values are in the accelerator's memory."""
        return self.kv == "gpu" and all(tier == "gpu" for tier in self.residence)

    def places(self, phase: RequestPhase) -> tuple[Place, ...]:
        """Return where each segment is computed in a phase."""
        return self.prompt if phase == "prompt" else self.decode


def kv_pages(work: NodeWork, request: Workload) -> int:
    """Return the bytes of all pages that the contexts of all sequences take."""
    pages = request.sequences * -(-request.context // PAGE_TOKENS)
    return pages * PAGE_TOKENS * work.kv_token

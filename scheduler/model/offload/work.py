"""What a node has to do in a step, segment by segment, and where each may lie and be computed. Nothing of time here."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Literal

from tpi.config import ModelConfig
from tpi.kernels.constants import PAGE_TOKENS
from tpi.kv import KvDtype, vector_bytes
from tpi.pack.blockfile import BlockShape
from tpi.pack.layout import BlockKind, RunLayout

Tier = Literal["gpu", "ram", "disk"]  # where a segment lies: the accelerator's memory, the host's, or the disk
Place = Literal["host", "accelerator"]  # where it is computed
KvTier = Literal["gpu", "ram"]
Pipeline = Literal["performance", "memory"]
Stretch = Literal["prompt", "decode"]  # the two kinds of step that a request is made of

TIERS: tuple[Tier, ...] = ("gpu", "ram", "disk")
PLACES: tuple[Place, ...] = ("host", "accelerator")
KV_TIERS: tuple[KvTier, ...] = ("gpu", "ram")
Cards = tuple[int, ...]
"""For each segment which accelerator of the node it is dealt to, from 0 on; empty: all to the first."""

STRETCHES: tuple[Stretch, Stretch] = ("prompt", "decode")
PIPELINES: tuple[Pipeline, ...] = ("performance", "memory")
VALUE = 4  # bytes of an activation


@dataclass(frozen=True)
class SegmentWork:
    """One segment: its weights, and of attention the keys and values of one token. Bytes and numbers of things."""

    block: int  # the number of its block, in order of use
    kind: BlockKind
    nbytes: int  # of its weights
    weights: int  # how many: each is multiplied and added once per token
    kv_token: int = 0  # bytes of the keys and values that one token adds
    pair: int = 0  # operations of one token with one token that it attends to
    window: int = 0  # tokens that it attends to at most; 0: all
    routed: int = 0  # bytes of its weights that are of experts
    chosen: float = 1.0  # the share of those experts that one token passes

    def touched(self, tokens: float) -> float:
        """Bytes of its weights that so many tokens read together, if each chooses its experts at random."""
        return self.nbytes - self.routed * float((1 - self.chosen) ** tokens)

    @property
    def passed(self) -> float:
        """How many of its weights one token is multiplied with."""
        return self.weights * self.touched(1) / max(1, self.nbytes)


@dataclass(frozen=True)
class TableWork:
    """The head: read, and multiplied with one hidden state per sequence; 0 bytes on a node without one."""

    nbytes: int = 0
    weights: int = 0


@dataclass(frozen=True)
class NodeWork:
    """All segments of a node in order of use, and what of a token crosses to an accelerator and back."""

    segments: tuple[SegmentWork, ...]
    crossing: int  # bytes of one token's hidden states, one way
    head: TableWork = TableWork()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights of all segments."""
        return sum(segment.nbytes for segment in self.segments)

    def touched(self, tokens: float) -> float:
        """Bytes of weights that so many tokens read together, the head's included."""
        return self.head.nbytes + sum(segment.touched(tokens) for segment in self.segments)

    @property
    def kv_token(self) -> int:
        """Bytes of the keys and values of one token, all layers."""
        return sum(segment.kv_token for segment in self.segments)

    @property
    def blocks(self) -> list[range]:
        """The numbers of each block's segments, block by block."""
        found = (list(same) for _, same in groupby(range(len(self.segments)), lambda at: self.segments[at].block))
        return [range(numbers[0], numbers[-1] + 1) for numbers in found]


@dataclass(frozen=True)
class StepSize:
    """A step: `tokens` of `sequences` together, after which each sequence has `context` tokens; means of many steps."""

    tokens: float
    sequences: int = 1
    context: float = 1

    @property
    def cached(self) -> float:
        """Tokens of each sequence that were there before."""
        return self.context - self.tokens / self.sequences

    @property
    def attended(self) -> float:
        """Tokens that a token attends to, on average: those before it, and itself."""
        return (self.cached + 1 + self.context) / 2


@dataclass(frozen=True)
class Workload:
    """What a node is planned for: so many sequences at once, their prompts, answers and room, in tokens each."""

    prompt: int = 512
    answer: int = 128
    sequences: int = 1
    context: int = 4096


@dataclass(frozen=True)
class Offload:
    """Where each segment lies, where each is computed in either stretch, where keys and values are, and the pipeline.

    Segments in the accelerator's memory are computed there. Keys and values lie where `kv` says, all of them. From RAM
    they are loaded before attention that is computed on the accelerator, and what it adds is saved after it; where they
    lie in the accelerator's memory, attention is computed nowhere else. With several accelerators a segment's is the
    one that it is dealt to, and so is the one of its keys and values.
    """

    residence: tuple[Tier, ...]
    prompt: tuple[Place, ...]
    decode: tuple[Place, ...]
    kv: KvTier
    pipeline: Pipeline
    head: Tier = "ram"  # of a node that has it; it is computed on the host
    slots: int = 0  # segments on the accelerator that come from elsewhere; 0: as few as the pipeline needs
    cards: Cards = ()

    def places(self, stretch: Stretch) -> tuple[Place, ...]:
        """Where each segment is computed in a stretch."""
        return self.prompt if stretch == "prompt" else self.decode


def work_of(
    config: ModelConfig,
    blocks: Sequence[BlockShape],
    kv_dtype: KvDtype,
    head: BlockShape | None = None,
    parts: int = 1,
) -> NodeWork:
    """The work of a node that holds all of `blocks`, in order of use, each FFN block in `parts` equal segments."""
    segments: list[SegmentWork] = []
    windows = iter(config.windows)
    for number, shape in enumerate(blocks):
        if shape.kind == "attention":
            segments.append(replace(_attention(config, number, shape, kv_dtype), window=next(windows, 0)))
        else:
            segments += _routed(config, shape, _ffn(number, shape, parts))
    table = TableWork(unit_bytes(head), _weights(head)) if head else TableWork()
    return NodeWork(tuple(segments), VALUE * config.hidden, table)


def half_of(shape: BlockShape) -> BlockKind:
    """Which half of a layer a block is: experts are a feed-forward block."""
    return "ffn" if shape.kind == "experts" else shape.kind


def unit_bytes(shape: BlockShape) -> int:
    """Bytes of the units of a block: what is loaded, without vectors and hashes."""
    return sum(run.units * run.unit_bytes for run in shape.runs)


def kv_pages(work: NodeWork, request: Workload) -> int:
    """Bytes of the pages for the context of every sequence."""
    pages = request.sequences * -(-request.context // PAGE_TOKENS)
    return pages * PAGE_TOKENS * work.kv_token


def _attention(config: ModelConfig, number: int, shape: BlockShape, kv_dtype: KvDtype) -> SegmentWork:
    kv = 2 * config.kv_heads * vector_bytes(config.head_dim, kv_dtype)
    pair = 4 * config.heads * config.head_dim  # multiply and add, for the score and for the mixed value
    return SegmentWork(number, half_of(shape), unit_bytes(shape), _weights(shape), kv, pair)


def _ffn(number: int, shape: BlockShape, parts: int) -> Iterator[SegmentWork]:
    if len(shape.runs) > 1:
        yield SegmentWork(number, half_of(shape), unit_bytes(shape), _weights(shape))
        return
    (run,) = shape.runs
    starts = [run.units * part // parts for part in range(parts + 1)]
    for units in (last - first for first, last in pairwise(starts)):
        yield SegmentWork(number, half_of(shape), units * run.unit_bytes, units * _unit_weights(run))


def _routed(config: ModelConfig, shape: BlockShape, segments: Iterable[SegmentWork]) -> Iterator[SegmentWork]:
    """Segments of a feed-forward block; of experts, each has the same part of every one."""
    mixture = config.mixture if shape.kind == "experts" else None
    routed = sum(run.units * run.unit_bytes for run in shape.runs if run.name == "neuron")
    for segment in segments:
        if mixture is None:
            yield segment
        else:
            part = segment.nbytes * routed // max(1, unit_bytes(shape))
            yield replace(segment, routed=part, chosen=mixture.used / mixture.experts)


def _weights(shape: BlockShape) -> int:
    return sum(run.units * _unit_weights(run) for run in shape.runs)


def _unit_weights(run: RunLayout) -> int:
    return run.width * run.hidden * len(run.parts)

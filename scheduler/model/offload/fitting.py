"""The check that a configuration fits into both memories, and else the smallest setting with which one fits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from scheduler.model.offload.candidates import WAYS, Residences, residences
from scheduler.model.offload.dealing import dealt_problems, to_be_dealt
from scheduler.model.offload.problem import I64, Problem
from scheduler.model.offload.tasks import Mask
from scheduler.model.offload.timeline import ACCELERATOR_SLOTS
from scheduler.model.offload.work import KV_TIERS, PIPELINES, REQUEST_PHASES, RequestPhase, kv_pages

_MIB = 1 << 20
_MOST = 1 << 30  # MiB: more than any machine has


def all_residences(problem: Problem) -> list[Residences]:
    """Return the candidates for every place of the keys and values and every pipeline that the limits allow."""
    limits = problem.limits
    kinds = [limits.kv] if limits.kv else KV_TIERS if problem.machine.accelerator else KV_TIERS[1:]
    pipelines = [limits.pipeline] if limits.pipeline else PIPELINES
    found = [residences(problem, kv, pipeline) for kv, pipeline in product(kinds, pipelines)]
    return [of for of in found if of is not None]


def feasible(problem: Problem) -> bool:
    """Return True if some configuration, for some division among accelerators, fits on all devices in both phases."""
    if to_be_dealt(problem):
        return any(feasible(dealt) for dealt in dealt_problems(problem))
    return any(
        np.logical_and.reduce(
            [
                np.logical_or.reduce([possible(problem, of, way, phase) for way in range(WAYS)])
                for phase in REQUEST_PHASES
            ]
        ).any()
        for of in all_residences(problem)
    )


def possible(problem: Problem, of: Residences, way: int, phase: RequestPhase) -> Mask:
    """Return which candidates can compute a phase in way `way`, `[candidates]`.

    `way` has the bits of `scheduler.model.offload.candidates.WAYS`. It also counts as impossible for candidates for
    which it is `redundant`, so that no configuration is compared twice.
    """
    device, found = problem.machine.accelerator, ~of.redundant(way)
    if of.kv == "gpu":
        found &= (of.on_accelerator(way) | ~of.attends).all(axis=0)
    place = problem.limits.place(phase)
    if place == "accelerator":
        found &= of.on_accelerator(way).all(axis=0)
    elif place == "host":
        found &= _computes_least(of, way)
    found &= _one_reader(of, way)
    if problem.machine.shared:  # without resident segments, no memory is set aside for the accelerator's slots
        found &= of.gpu.any(axis=0) | np.full(of.count, of.kv == "gpu") | ~of.on_accelerator(way).any(axis=0)
    if device is None:
        return found & ~of.gpu.any(axis=0) & (way == 0) & (of.kv == "ram")
    tokens = problem.tokens if phase == "prompt" else problem.request.sequences
    for number, card in enumerate(problem.machine.cards):
        found &= accelerator_bytes(problem, of, way, tokens, number).total <= card.memory
    return found


def _computes_least(of: Residences, way: int) -> Mask:
    """Return the candidates in which the accelerator computes only the segments that it must compute, `[candidates]`.

    The accelerator must compute its resident segments. If it has the keys and values, it must also compute attention.
    If some of this attention is streamed while any segment is on disk, it may compute all streamed segments: by the
    rule of `_one_reader`, they are computed in one place.
    """
    there = np.full(of.count, of.kv == "gpu")
    forced = there & of.disk.any(axis=0) & (of.attends & ~of.gpu).any(axis=0)  # by the rule of `_one_reader`
    copied = (of.on_accelerator(way) & ~of.gpu & (~of.attends | (of.kv == "ram"))).any(axis=0)
    return np.logical_or(forced, np.logical_not(copied))


def _one_reader(of: Residences, way: int) -> Mask:
    """Return the candidates in which only one device reads from the disk if they compute in way `way`, `[candidates]`.

    The disk is read in the order of use, for the accelerator's ring or for the host, but not for both. So either
    nothing is on disk, or all segments outside the accelerator's memory are computed on one device.
    """
    outside, there = ~of.gpu, of.on_accelerator(way)
    mixed = (outside & there).any(axis=0) & (outside & ~there).any(axis=0)
    return np.logical_not(mixed & of.disk.any(axis=0))


@dataclass(frozen=True)
class TakenBytes:
    """Bytes of an accelerator's memory by purpose, `[candidates]` each."""

    resident: I64
    kv: I64
    slots: I64
    activations: I64

    @property
    def total(self) -> I64:
        """Number of bytes for all purposes together."""
        found: I64 = self.resident + self.kv + self.slots + self.activations
        return found

    def total_with(self, other: "TakenBytes") -> I64:
        """Return the total bytes for two phases, this one and `other`, which share buffers of the larger size."""
        most = (np.maximum(self.kv, other.kv), np.maximum(self.slots, other.slots))
        found: I64 = self.resident + most[0] + most[1] + np.maximum(self.activations, other.activations)
        return found


def fit_together(problem: Problem, of: Residences, prompt: int, decode: int) -> Mask:
    """Return which candidates fit into the accelerators' memory, `[candidates]`.

    They compute prompts in way `prompt`, and the tokens of answers in way `decode`.
    """
    found = np.ones(of.count, np.bool_)
    for number, card in enumerate(problem.machine.cards):
        long = accelerator_bytes(problem, of, prompt, problem.tokens, number)
        found &= (
            long.total_with(accelerator_bytes(problem, of, decode, problem.request.sequences, number)) <= card.memory
        )
    return found


def accelerator_bytes(problem: Problem, of: Residences, way: int, tokens: int, card: int = 0) -> TakenBytes:
    """Return the bytes of an accelerator's memory that candidates take with steps of `tokens` tokens."""
    dealt = problem.dealt(card)
    there, gpu, slots = of.on_accelerator(way) & dealt, of.gpu & dealt, ACCELERATOR_SLOTS[of.pipeline]
    kept = np.where(gpu, problem.sizes, 0).sum(axis=0)
    kv_token = np.where(dealt, np.array([[segment.kv_token] for segment in problem.work.segments]), 0)
    layers: I64 | int = int(kv_token.sum())
    if of.kv == "ram":
        layers = largest_neighbours(there & of.attends, kv_token, slots)
    pages = kv_pages(problem.work, problem.request) * layers // max(problem.work.kv_token, 1)
    copied = largest_neighbours(there & ~gpu, problem.sizes, slots)
    activations = np.where(there.any(axis=0), problem.needs.card_need.nbytes(tokens), 0)
    return TakenBytes(kept, np.broadcast_to(pages, kept.shape), copied, activations)


def largest_neighbours(mask: Mask, sizes: I64, count: int) -> I64:
    """Return the bytes of the largest `count` consecutive segments in each column of `mask`, `[candidates]`.

    This is `scheduler.model.ring.neighbours` for many candidates at once.
    """
    around = np.where(mask, sizes, 0)
    last, most = [np.zeros(mask.shape[1], np.int64)] * count, np.zeros(mask.shape[1], np.int64)
    for row, size in [*zip(mask, around, strict=True)] * 2:  # twice, for the last segments precede the first ones
        last = [np.where(row, new, old) for new, old in zip([size, *last], last, strict=False)]
        most = np.maximum(most, sum(last))
    everything: I64 = around.sum(axis=0)
    return np.minimum(most, everything)


def refusal(problem: Problem) -> str:
    """Return the message for a problem without a solution: which memory is too small, and how large it must be."""
    limits, device = problem.limits, problem.machine.accelerator
    asked = [f"--{name} {value}" for name, value in (("weights", limits.weights), ("kv", limits.kv)) if value]
    if device is None and "gpu" in (limits.weights, limits.kv):
        return f"{' '.join(asked)} needs an accelerator, and this node has none; leave it out or give --device"
    what = f"this model with {' '.join(asked)}" if asked else "this model"
    if feasible(with_memory(problem, _MOST)):
        least = _least(lambda size: with_memory(problem, size))
        return f"{_mib(problem.machine.memory)} of memory is too little for {what}: --memory {least}MiB would do"
    least = _least(lambda size: with_gpu_memory(problem, size))
    if least < _MOST:
        have = " and ".join(_mib(card.memory + problem.reserve) for card in problem.machine.cards) or _mib(0)
        return f"GPU memory of {have} is too little for {what}: --gpu-memory {least}MiB would do"
    enough = with_gpu_memory(problem, _MOST)
    memory = _least(lambda size: with_memory(enough, size))
    gpu = _least(lambda size: with_gpu_memory(with_memory(problem, memory), size))
    return (
        f"RAM and GPU memory are both too little for {what}: --memory {memory}MiB with --gpu-memory {gpu}MiB would do"
    )


def with_memory(problem: Problem, size: int) -> Problem:
    """Return the problem with `size` MiB of RAM."""
    return replace(problem, machine=replace(problem.machine, memory=size * _MIB))


def with_gpu_memory(problem: Problem, size: int) -> Problem:
    """Return the problem with `size` MiB on every accelerator, less the bytes that are set aside."""
    left = max(0, size * _MIB - problem.reserve)
    return replace(problem, machine=problem.machine.with_cards(lambda card: replace(card, memory=left)))


def _least(of: Callable[[int], Problem]) -> int:
    """Return the smallest MiB for which `of(MiB)` is a problem that has a solution; `_MOST` if there is none."""
    least, enough = 0, _MOST
    while enough - least > 1:
        middle = (least + enough) // 2
        least, enough = (least, middle) if feasible(of(middle)) else (middle, enough)
    return enough


def _mib(size: int) -> str:
    return f"{size // _MIB}MiB" if size >= _MIB else f"{size >> 10}KiB"

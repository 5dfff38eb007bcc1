"""Shared helpers for tests of offloading: nodes with accelerators, and answers to compare."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from master.deployment.deployment import Deployment
from master.generation.engine import Engine
from master.generation.request import Request, Sampled
from master.vocabulary.sampler import Sampler, Sampling
from scheduler.model.machine import LAPTOP, laptop_gpu
from tests.support.cluster.inprocess import in_process_deployment
from tpi.devices.base import Device
from tpi.devices.options import OffloadOptions
from tpi.pack.reader import Pack
from worker.equipment import AcceleratorSetup
from worker.pipelines.accelerated import BatchAccelerated
from worker.plan.choose import Choose

GREEDY = Sampling(temperature=0)


@contextmanager
def offloaded(
    pack: Pack,
    cache: Path,
    devices: Mapping[int, Device | Sequence[Device]],
    options: OffloadOptions,
    shares: Sequence[float] = (1,),
    decide: Mapping[int, Choose] | None = None,
    shared: bool = False,
    follow: float | None = None,
    **more: Any,
) -> Iterator[Deployment]:
    """Run a deployment whose ranks have `devices`; check at the end that their memory is empty.

    `decide` has planners by rank, which replace the nodes' own. `shared`: accelerators use the host's memory.
    `follow` is the figure of this name of all accelerators (`scheduler.model.machine.Accelerator`).
    """
    of_ranks = {rank: list(these) if isinstance(these, Sequence) else [these] for rank, these in devices.items()}
    accelerators = {
        rank: _beside(these, options, (decide or {}).get(rank), shared, follow) for rank, these in of_ranks.items()
    }
    with ExitStack() as stack:
        for device in (device for these in of_ranks.values() for device in these):
            stack.callback(_check_empty, device)
        yield stack.enter_context(
            closing(in_process_deployment(pack, shares, cache, accelerators=accelerators, **more))
        )


def _beside(
    devices: Sequence[Device], options: OffloadOptions, decide: Choose | None, shared: bool, follow: float | None
) -> AcceleratorSetup:
    """Return the setup of laptops' cards, which differ only in their memory."""
    first, *more = devices
    figures = replace(LAPTOP, more=(laptop_gpu(),) * len(more)).with_cards(
        lambda card: replace(card, shared=shared, follow=follow)
    )
    return AcceleratorSetup(first, figures, options, decide, more=tuple(more))


def batched(deployment: Deployment, micro_batch: int = 3) -> BatchAccelerated:
    """Make a node compute batches in micro-batches of `micro_batch` sequences; return its accelerator."""
    link = deployment.node.link
    assert isinstance(link, BatchAccelerated)
    link.pipeline.schedule = replace(link.pipeline.schedule, micro_batch=micro_batch)
    return link


def weights_bytes(pack: Pack) -> int:
    """Return the bytes of all blocks of a pack."""
    return sum(block.shape.nbytes for layer in pack.layers for block in layer)


def prompts(vocabulary: int, count: int, seed: int, longest: int = 40) -> list[list[int]]:
    """Return `count` random prompts of 1 to `longest` tokens."""
    random = np.random.default_rng(seed)
    return [random.integers(3, vocabulary, random.integers(1, longest + 1)).tolist() for _ in range(count)]


def answers(deployment: Deployment, asked: Sequence[Sequence[int]], length: int = 6) -> list[list[int]]:
    """Return greedy answers to all prompts at once; free their pages, also after an error."""
    engine = Engine(deployment)
    found: list[list[int]] = [[] for _ in asked]

    def sink(number: int, sampled: Sampled) -> bool:
        found[number].append(sampled.token)
        return True

    for number, prompt in enumerate(asked):
        sequence = engine.admit(prompt)
        engine.submit(Request(sequence, Sampler(GREEDY), length, partial(sink, number)))
    requests = engine.requests
    try:
        while engine.requests:
            engine.step()
    finally:
        for request in requests:
            engine.withdraw(request)
            engine.release(request.sequence)
    return found


def _check_empty(device: Device) -> None:
    assert device.memory.used == 0, f"{device.name} still has {device.memory.used} bytes"

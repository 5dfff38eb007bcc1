"""Shared helpers for tests of nodes whose accelerators hold some of the experts."""

from dataclasses import replace
from typing import Any

from scheduler.model.machine import LAPTOP, Accelerator, NodeMachine
from tpi.devices.options import OffloadOptions
from tpi.devices.pages import PAGE
from worker.demand.accelerated import ExpertAccelerated
from worker.demand.arena import ExpertArena
from worker.node.node import Node
from worker.plan.case import Candidate, Case
from worker.plan.choose import Choose
from worker.plan.modes.experts import CardSlots, from_memory

DEMAND = OffloadOptions(pipeline="demand")
SMALL: dict[str, Any] = {"context": 64, "pool": 96}  # tokens, pages


def slots_for_share(share: float, crossover: int | None = None) -> Choose:
    """Return a planner with slots for the share `share` of the experts, even if memory holds more."""

    def decide(case: Case) -> Candidate[CardSlots]:
        found = from_memory(replace(case, options=replace(case.options, crossover=crossover)))
        assert found is not None
        assert found.offload is not None
        slots = replace(found.details, slots=max(1, int(share * found.details.expert_count)))
        return replace(found, details=slots, offload=replace(found.offload, other_bytes=slots.arena_bytes))

    return decide


def limit_for(share: float, case: Case) -> int:
    """Return the bytes of accelerator memory for `share` of the experts and all other weights, in whole pages."""
    machine = case.machine
    assert machine is not None

    def slots(size: int) -> float:
        room = machine.with_cards(lambda card: replace(card, memory=size))
        found = from_memory(replace(case, machine=room, options=OffloadOptions()))
        return found.details.slots / found.details.expert_count if found else 0.0

    least, enough = 0, 64 << 20
    while enough - least > PAGE:
        middle = (least + enough) // 2
        least, enough = (least, middle) if slots(middle) >= share else (middle, enough)
    return enough


def at_once(link: float = 1.0) -> NodeMachine:
    """Return a laptop whose calls and copies begin at once, with a link `link` times as fast.

    On a usual laptop, copies of experts as small as in these tests would never pay.
    """

    def begun(card: Accelerator) -> Accelerator:
        up = card.link.up * link
        return replace(card, rates=replace(card.rates, start=0.0), link=replace(card.link, up=up, latency=0.0))

    return replace(LAPTOP.with_cards(begun), host=replace(LAPTOP.host, start=0.0))


def arena_of(node: Node) -> ExpertArena:
    """Return the cache of experts on a node's accelerator."""
    assert isinstance(node.link, ExpertAccelerated)
    assert node.link.arena is not None
    return node.link.arena

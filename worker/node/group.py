"""The collective of a node: its group within the stage, and the hops to the other stages."""

from contextlib import ExitStack, closing
from dataclasses import replace

from allreduce.base import Endpoints, Group, GroupSpec, Peer, open_group
from allreduce.connections import Connections
from allreduce.hops import Hops, sums_lane
from tpi.system.machine import usable_cores
from worker.node_plan import NodePlan

_SPIN_US = 300  # microseconds; about the time that a thread needs to fall asleep and wake up again
_PREFILL = 128  # tokens of the prefill step for which the collective is tuned


def join_group(stack: ExitStack, plan: NodePlan, threads: int, endpoints: Endpoints) -> tuple[Group, Hops | None]:
    """Join the group of the nodes of this node's stage; return it, and the node's hops if there are several stages.

    `stack` closes both. `threads` is the number of threads with which the node computes.
    """
    spec, hops = _group_spec(plan, threads), None
    peers = tuple(spec.peers[rank] for rank in plan.group)
    lane = sums_lane(plan.passes[0].stage or 0)
    own = replace(spec, rank=plan.group.index(plan.rank), peers=peers, lane=lane)
    if not plan.whole:
        connections = stack.enter_context(closing(Connections(spec, endpoints)))
        hops = Hops(connections, [stage.ranks for stage in plan.stages], plan.config.hidden, plan.wire)
        endpoints = replace(endpoints, connections=connections)
    return stack.enter_context(closing(open_group(plan.collective, own, endpoints))), hops


def _group_spec(plan: NodePlan, threads: int) -> GroupSpec:
    """Return the group of all nodes."""
    peers = tuple(Peer(peer.rank, peer.name, peer.address, peer.key) for peer in plan.peers)
    hidden = plan.config.hidden
    return GroupSpec(
        rank=plan.rank,
        session=plan.session,
        epoch=plan.epoch,
        peers=peers,
        wire=plan.wire,
        timeout_s=plan.options.timeout_s,
        spin_us=_spin_us(plan, threads),
        payload_values=(hidden, _PREFILL * hidden),
    )


def _spin_us(plan: NodePlan, threads: int) -> int:
    """Return how long a thread spins before it sleeps while it waits for a sum, in microseconds.

    Spinning pays if all nodes are on one machine and each of their threads has a core. Over sockets it does not: the
    spinning thread would take the core that ZeroMQ's I/O thread needs.
    """
    alone = plan.collective == "shared" and len(plan.group) * threads <= usable_cores()
    return _SPIN_US if alone else 0

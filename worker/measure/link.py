"""Measurement of the link between this worker and another worker, before the master plans."""

import logging
from dataclasses import replace

from allreduce.base import Endpoints, GroupSpec, Peer
from allreduce.measure import measure_links
from allreduce.transport import Transport
from tpi.errors import NodeLost, UsageError
from tpi.net.questions import AskLink, MeasuredLink

REACH_S = 1.0  # seconds that a worker waits for the other one
_STEP = 1
log = logging.getLogger(__name__)


def measure_pair(asked: AskLink, endpoints: Endpoints) -> MeasuredLink:
    """Return the link between the two workers of `asked`, one of which is this one.

    Latency and bandwidth are 0 if the other worker is not reached. For the measurement, the two workers form a group of
    their own, whose session number is `asked.number`. No other group of this node may wait for messages meanwhile,
    because all groups receive from one socket. `endpoints.watch` can end the measurement with an error.
    """
    latency = rate = 0.0
    peers = tuple(Peer(peer.rank, peer.name, peer.address, peer.key) for peer in asked.peers)
    spec = GroupSpec(asked.rank, asked.number, 0, peers, timeout_s=REACH_S)
    transport = Transport(spec, replace(endpoints, connections=None))
    try:
        transport.connect(range(spec.size))
        transport.begin(_STEP)
        link = measure_links(transport, {}, asked.seconds).between(0, 1)
        latency, rate = link.latency_s, link.bytes_per_s
    except (NodeLost, UsageError) as error:  # it is not reached, or its address or key cannot be used
        log.info("a link is not measured: %s", error)
    finally:
        transport.close()
    return MeasuredLink(asked.session, asked.epoch, asked.number, latency, rate)

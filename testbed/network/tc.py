"""Emulation by the kernel: routers are namespaces too, links are veth pairs, and `tbf` and `netem` shape both ends.

`kernel_requests` returns a list of `KernelRequest`s without sending it, so that tests can compare the list with a
golden file on machines whose kernel has no netem.
"""

import os
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute

from testbed.network.namespaces import inside, new_namespace
from tpi.topology.topology import UNLIMITED, HostLink, Topology

MTU = 1500
# tbf's burst: the larger of the bytes sent in this many seconds, and this many bytes
_BURST_SECONDS, _BURST_BYTES = 1e-3, 15000
_FRAME = 1514  # bytes of a full packet with its Ethernet header
_MANY = 1_000_000  # netem's queue limit, in packets
_SWITCHES = (("ip_forward", "1"), ("conf/all/rp_filter", "0"), ("conf/default/rp_filter", "0"))


@dataclass(frozen=True)
class KernelRequest:
    """One netlink request in the namespace of `node`.

    In `fields`, `peer` is the name of a node, and `dev` the name of an interface.
    """

    node: str
    call: str  # method of IPRoute: link, addr, route, tc
    verb: str
    fields: dict[str, Any] = field(default_factory=dict)


def kernel_requests(topology: Topology) -> list[KernelRequest]:
    """Return all requests to the kernel for `topology`, given an empty namespace for each device and router."""
    requests = [
        KernelRequest(
            device.name, "addr", "add", {"dev": "lo", "address": topology.address(device.name), "prefixlen": 32}
        )
        for device in topology.devices
    ]
    for number, link in enumerate(topology.links):
        requests += _cable(number, link)
    for number, link in enumerate(topology.links):
        for end in link.ends:
            requests += shaping(end, f"l{number}", link)
    return [*requests, *(route for node in topology.nodes for route in routes(topology, node))]


def shaping(node: str, interface: str, link: HostLink, verb: str = "add") -> Iterator[KernelRequest]:
    """Yield the requests that shape the sending end of a link: tbf for its rate, netem for delay and loss.

    netem takes microseconds and per cent. Its limit counts all packets, those under way and those in the queue. `verb`
    is the command for `IPRoute.tc`.
    """
    parent: dict[str, Any] = {"parent": "ffff:ffff", "handle": "1:"}
    rate = link.bandwidth / 8
    if rate != UNLIMITED:
        burst = max(round(rate * _BURST_SECONDS), _BURST_BYTES)
        limit = round(rate * link.queue) + burst
        tbf: dict[str, Any] = {"rate": round(rate), "burst": burst, "limit": limit}
        yield KernelRequest(node, "tc", verb, {"kind": "tbf", "dev": interface, **parent, **tbf})
        parent = {"parent": "1:1", "handle": "10:"}
    if link.latency or link.jitter or link.loss:
        netem: dict[str, Any] = {"delay": round(link.latency * 1e6), "jitter": round(link.jitter * 1e6)}
        seconds = link.latency + link.jitter + link.queue
        packets = _MANY if rate == UNLIMITED else round(rate * seconds / _FRAME) + 100
        netem |= {"loss": link.loss * 100, "limit": packets}
        yield KernelRequest(node, "tc", verb, {"kind": "netem", "dev": interface, **parent, **netem})


def routes(topology: Topology, node: str) -> Iterator[KernelRequest]:
    """Yield the routes at `node` to every device. Each names the next hop on a path that crosses the node."""
    own = [device.name for device in topology.devices]
    for target in own:
        for source in own:
            hops = [hop for hop in topology.path(source, target) if hop.source == node] if source != target else []
            if hops:
                number = topology.links.index(hops[0].link)
                fields = {"dst": f"{topology.address(target)}/32", "dev": f"l{number}"}
                fields["gateway"] = _transfer(number, hops[0].link, hops[0].target)
                if node in own:
                    fields["prefsrc"] = topology.address(node)
                yield KernelRequest(node, "route", "replace", fields)
                break


def _cable(number: int, link: HostLink) -> Iterator[KernelRequest]:
    """Yield the requests that create a veth pair, give each end its transfer address, and set both ends up."""
    first, second = link.ends
    name = f"l{number}"
    yield KernelRequest(first, "link", "add", {"ifname": name, "kind": "veth", "peer": second})
    for end in link.ends:
        yield KernelRequest(end, "addr", "add", {"dev": name, "address": _transfer(number, link, end), "prefixlen": 30})
        yield KernelRequest(end, "link", "set", {"dev": name, "mtu": MTU, "state": "up"})


def _transfer(number: int, link: HostLink, end: str) -> str:
    """Return the address of one end of link `number`. Each link has a network of four addresses."""
    base = 4 * number + 1 + link.ends.index(end)
    return f"10.78.{base >> 8}.{base & 255}"


class TcBackend:
    """A backend with namespaces for devices and routers, links by veth pairs, and shaping by the kernel."""

    mtu = MTU

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        nodes = topology.nodes
        self._namespaces = {name: new_namespace() for name in nodes}
        self.namespaces = [self._namespaces[device.name] for device in topology.devices]
        self._started = time.monotonic()
        for name in nodes:
            with inside(self._namespaces[name]):
                for switch, value in _SWITCHES:
                    Path("/proc/sys/net/ipv4", switch).write_text(value)
        self._carry_out(kernel_requests(topology))

    def serve(self, others: dict[int, Callable[[], bool]]) -> None:
        """Answer requests until a handler returns False. The kernel carries the packets."""
        while True:
            ready, _, _ = select.select(list(others), [], [])
            if not all(others[descriptor]() for descriptor in ready):
                return

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """Return the functions for requests to the holder."""
        return {"cut": self.cut, "heal": self.heal, "slow": self.slow, "report": self.report, "reset": lambda: None}

    def report(self) -> dict[str, Any]:
        """Return the seconds since the start.

        There are no other figures, because the kernel does not count its work separately.
        """
        return {"seconds": time.monotonic() - self._started}

    def cut(self, device: str) -> None:
        """Set the links of the device down at their far ends, so that its programs see silence and not an error."""
        for number, _, far in self._cables(device):
            self._carry_out([KernelRequest(far, "link", "set", {"dev": f"l{number}", "state": "down"})])

    def heal(self, device: str) -> None:
        """Undo `cut` and `slow`: all packets pass again, with the bandwidth and latency of the device's links."""
        for number, link, far in self._cables(device):
            self._carry_out([KernelRequest(far, "link", "set", {"dev": f"l{number}", "state": "up"})])
            self._carry_out(list(routes(self._topology, far)))
            self._reshape(number, link)

    def slow(self, device: str, bandwidth: float | None, latency: float) -> None:
        """Limit the links of the device to `bandwidth` bits per second and add `latency` seconds to their delay.

        If `bandwidth` is None, the links keep their own.
        """
        for number, link, _ in self._cables(device):
            rate = min(link.bandwidth, bandwidth or UNLIMITED)
            self._reshape(number, replace(link, bandwidth=rate, latency=link.latency + latency))

    def _reshape(self, number: int, link: HostLink) -> None:
        for end in link.ends:
            with inside(self._namespaces[end]), IPRoute() as kernel:
                index = kernel.link_lookup(ifname=f"l{number}")[0]
                if any(queue["handle"] == 0x10000 for queue in kernel.get_qdiscs(index)):
                    kernel.tc("del", index=index, parent=0xFFFFFFFF)
            self._carry_out(list(shaping(end, f"l{number}", link)))

    def _cables(self, device: str) -> Iterator[tuple[int, HostLink, str]]:
        """Yield the number, the link and the far end of each link of `device`."""
        for number, link in enumerate(self._topology.links):
            if device in link.ends:
                yield number, link, link.ends[1 - link.ends.index(device)]

    def _carry_out(self, requests: list[KernelRequest]) -> None:
        """Send requests through one socket per namespace. Within a namespace they are sent in order.

        Links are created before other requests are sent.
        """
        for cables in (True, False):
            for node, namespace in self._namespaces.items():
                mine = [one for one in requests if one.node == node and ("peer" in one.fields) == cables]
                if mine:
                    self._send(namespace, mine)

    def _send(self, namespace: int, requests: list[KernelRequest]) -> None:
        with inside(namespace), IPRoute() as kernel:
            for request in requests:
                fields = dict(request.fields)
                if "peer" in fields:
                    target = os.dup(self._namespaces[fields["peer"]])
                    fields["peer"] = {"ifname": fields["ifname"], "net_ns_fd": target}
                interface = fields.pop("dev", None)
                if interface is not None:
                    index = kernel.link_lookup(ifname=interface)[0]
                    fields["oif" if request.call == "route" else "index"] = index
                try:
                    getattr(kernel, request.call)(request.verb, **fields)
                finally:
                    if "peer" in fields:
                        os.close(fields["peer"]["net_ns_fd"])

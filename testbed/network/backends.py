"""Two ways to emulate links behind one interface: `tun` (the user-space link) and `tc` (the kernel's netem and tbf)."""

from collections.abc import Callable
from typing import Any, Protocol

from testbed.network.namespaces import inside, new_namespace, open_tun
from tpi.errors import TestbedError
from tpi.topology.topology import PREFIX, Topology

NAMES = ("tc", "tun")


class Backend(Protocol):
    """An emulated network inside the holder process."""

    namespaces: list[int]  # descriptors, one per device in the topology's order
    mtu: int

    def serve(self, others: dict[int, Callable[[], bool]]) -> None:
        """Run the network. Call a handler in `others` when its descriptor is readable, until one returns False."""

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """Return the functions for requests through `testbed.control`.

        The requests are cut, heal, slow, report, reset, and for the `tun` backend compensate.
        """


class TunBackend:
    """One TUN device per namespace, all served by this process."""

    def __init__(self, topology: Topology) -> None:
        from testbed.network.tunlink import MTU, TunLink  # in C++, and on Linux only

        # No offload on lossy links: a loss must drop one packet, not a batch of 64 KiB.
        offload = not any(link.loss for link in topology.links)
        self.mtu = MTU
        self.namespaces: list[int] = []
        tuns = []
        for device in topology.devices:
            self.namespaces.append(new_namespace())
            with inside(self.namespaces[-1]):
                tuns.append(open_tun(topology.address(device.name), PREFIX, MTU, offload))
        self._link = TunLink(topology, tuns)

    def serve(self, others: dict[int, Callable[[], bool]]) -> None:
        """Carry packets. Call a handler in `others` when its descriptor is readable, until one returns False."""
        self._link.serve(others)

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """Return the functions for requests to the link process."""
        link = self._link
        return {
            "cut": link.cut,
            "heal": link.heal,
            "slow": link.slow,
            "report": link.report,
            "reset": link.reset,
            "compensate": link.compensate,
        }


def choose_backend(topology: Topology, wanted: str, has_netem: bool) -> str:
    """Return the backend to use.

    For `wanted` "auto", return tc if the kernel supports all features of the topology, else tun.

    Raises:
        TestbedError: if `wanted` cannot emulate the topology.
    """
    shared = any(router.shared is not None for router in topology.routers)
    delays = any(link.latency or link.jitter or link.loss for link in topology.links)
    if wanted == "auto":
        return "tc" if has_netem and not shared else "tun"
    if wanted not in NAMES:
        raise TestbedError(f"unknown backend {wanted!r}; choose one of auto, {', '.join(NAMES)}")
    if wanted == "tc" and shared:
        raise TestbedError("the tc backend cannot emulate a shared medium: use --backend tun")
    if wanted == "tc" and delays and not has_netem:
        raise TestbedError("this kernel has no netem, so tc cannot delay or lose packets: use --backend tun")
    return wanted


def open_backend(topology: Topology, name: str) -> Backend:
    """Create the namespaces and links of `topology`. The network ends with this process."""
    if name == "tun":
        return TunBackend(topology)
    from testbed.network.tc import TcBackend  # pyroute2 takes a third of a second to import

    return TcBackend(topology)

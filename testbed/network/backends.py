"""Two ways of shaping links behind one interface: `tun` (the user-space link) and `tc` (the kernel's netem and tbf)."""

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
        """Run until a handler of one of the `others` descriptors returns False."""

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """What `testbed.control` may ask: cut, heal, slow, report, reset, compensate."""


class TunBackend:
    """One TUN device per namespace, all carried by this process."""

    def __init__(self, topology: Topology) -> None:
        from testbed.network.tunlink import MTU, TunLink  # in C++, and on Linux only

        # A lost packet must be one packet: no handing over of 64 KiB at once where links lose some.
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
        """Carry packets."""
        self._link.serve(others)

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """Requests that the link process answers."""
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
    """The backend to use: `wanted` unless that is "auto", then tc where the kernel can do all that the topology asks.

    Raises:
        TestbedError: if `wanted` cannot do it.
    """
    shared = any(router.shared is not None for router in topology.routers)
    delays = any(link.latency or link.jitter or link.loss for link in topology.links)
    if wanted == "auto":
        return "tc" if has_netem and not shared else "tun"
    if wanted not in NAMES:
        raise TestbedError(f"there is no backend {wanted!r}; there are auto, {', '.join(NAMES)}")
    if wanted == "tc" and shared:
        raise TestbedError("the tc backend cannot emulate a shared medium: use --backend tun")
    if wanted == "tc" and delays and not has_netem:
        raise TestbedError("this kernel has no netem, so tc cannot delay or lose packets: use --backend tun")
    return wanted


def open_backend(topology: Topology, name: str) -> Backend:
    """Make the namespaces and links of `topology`; they last as long as this process."""
    if name == "tun":
        return TunBackend(topology)
    from testbed.network.tc import TcBackend  # pyroute2 takes a third of a second to import

    return TcBackend(topology)

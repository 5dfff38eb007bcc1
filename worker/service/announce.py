"""Tells the network that this worker is there, so that masters which are paired with it need no address."""

import logging
from collections.abc import Sequence
from threading import Thread
from typing import TYPE_CHECKING

from tpi.keys.announcement import SERVICE, Announcement

if TYPE_CHECKING:
    from zeroconf import Zeroconf

_EVERYWHERE = ("0.0.0.0", "::", "[::]")
_STOP_S = 5.0
log = logging.getLogger(__name__)


class Announcer:
    """Announces until it is closed. The network is spoken to by threads of its own; what fails there is only logged."""

    def __init__(self, name: str, key: bytes, host: str, port: int) -> None:
        """`host` is what the worker listens on."""
        self._said = Announcement(name, key, port, tuple(_hosts(host)))
        self._network: Zeroconf | None = None
        self._thread = Thread(target=self._announce, name="announce", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say goodbye."""
        self._thread.join(_STOP_S)
        if self._network is not None:
            self._network.close()

    def _announce(self) -> None:
        try:
            from zeroconf import ServiceInfo, Zeroconf

            self._network = Zeroconf(interfaces=list(self._said.hosts))
            self._network.register_service(
                ServiceInfo(
                    SERVICE, self._said.instance, port=self._said.port,
                    addresses=self._said.packed_hosts, properties=self._said.properties,
                ),
                allow_name_change=True,
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - a network without multicast, a firewall: addresses do as well
            log.warning(
                "this worker is not announced in the network (%s); give masters its address", error or "no reason"
            )


def _hosts(host: str) -> Sequence[str]:
    """The addresses at which others can reach whoever listens on `host`."""
    if host not in _EVERYWHERE:
        return [host.strip("[]")]
    import ifaddr

    found = [str(ip.ip) for adapter in ifaddr.get_adapters() for ip in adapter.ips if ip.is_IPv4]
    return [one for one in found if not one.startswith("127.")]

"""Announcement of this worker on the local network (mDNS), so that paired masters need no address."""

import logging
from collections.abc import Sequence
from threading import Event, Thread
from typing import TYPE_CHECKING

from tpi.keys.announcement import SERVICE, Announcement

if TYPE_CHECKING:
    from zeroconf import Zeroconf

_ALL_ADDRESSES = ("0.0.0.0", "::", "[::]")
_CHECK_S = 1.0  # between checks of this machine's addresses, which change when a laptop moves to another network
_RETRY_S = 10.0  # before a failed announcement is tried again
_STOP_S = 5.0
log = logging.getLogger(__name__)


class Announcer:
    """An announcement of this worker over mDNS, until `close`. A thread of its own repeats it and logs failures."""

    def __init__(self, name: str, key: bytes, host: str, port: int) -> None:
        """Start to announce the worker `name`, with its public key, and the host and port that it listens on."""
        self._name, self._key, self._host, self._port = name, key, host, port
        self._network: Zeroconf | None = None
        self._failed = False
        self._over = Event()
        self._thread = Thread(target=self._keep, name="announce", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Withdraw the announcement and end the thread."""
        self._over.set()
        self._thread.join(_STOP_S)

    def _keep(self) -> None:
        """Announce the worker until `close`, and again each time the addresses of this machine change."""
        announced: Sequence[str] = ()
        while not self._over.is_set():
            hosts = _hosts(self._host)
            if hosts != announced or self._failed:
                self._withdraw()
                self._announce(hosts)
                announced = hosts
            self._over.wait(_RETRY_S if self._failed else _CHECK_S)
        self._withdraw()

    def _announce(self, hosts: Sequence[str]) -> None:
        try:
            if hosts:
                self._register(Announcement(self._name, self._key, self._port, tuple(hosts)))
            self._failed = False
        except Exception as error:  # noqa: BLE001 - no multicast, or a firewall: masters can use an address
            if not self._failed:
                log.warning(
                    "cannot announce this worker in the network (%s); give masters its address", error or "no reason"
                )
            self._failed = True

    def _register(self, said: Announcement) -> None:
        from zeroconf import ServiceInfo, Zeroconf

        logging.getLogger("zeroconf").setLevel(logging.ERROR)  # it warns of each dropped packet
        self._network = Zeroconf(interfaces=list(said.hosts))
        self._network.register_service(
            ServiceInfo(
                SERVICE, said.instance, port=said.port, addresses=said.packed_hosts, properties=said.properties
            ),
            allow_name_change=True,
        )  # fmt: skip

    def _withdraw(self) -> None:
        """Withdraw the announcement; only log a failure, because the machine may have lost the announced addresses."""
        network, self._network = self._network, None
        try:
            if network is not None:
                network.close()
        except Exception as error:  # noqa: BLE001 - no caller depends on it
            log.debug("cannot withdraw the announcement: %s", error)


def _hosts(host: str) -> Sequence[str]:
    """Return the sorted addresses at which other machines can reach a server that listens on `host`."""
    if host not in _ALL_ADDRESSES:
        return [host.strip("[]")]
    import ifaddr

    found = {str(ip.ip) for adapter in ifaddr.get_adapters() for ip in adapter.ips if ip.is_IPv4}
    return sorted(one for one in found if not one.startswith("127."))

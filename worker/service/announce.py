"""Tells the network that this worker is there, so that masters which are paired with it need no address."""

import logging
from collections.abc import Sequence
from threading import Event, Thread
from typing import TYPE_CHECKING

from tpi.keys.announcement import SERVICE, Announcement

if TYPE_CHECKING:
    from zeroconf import Zeroconf

_EVERYWHERE = ("0.0.0.0", "::", "[::]")
_LOOK_S = 1.0  # between two looks at this machine's addresses, of which a laptop gets others where it wakes
_AGAIN_S = 10.0  # until what failed is tried again
_STOP_S = 5.0
log = logging.getLogger(__name__)


class Announcer:
    """Announces until it is closed. The network is spoken to by threads of its own; what fails there is only logged."""

    def __init__(self, name: str, key: bytes, host: str, port: int) -> None:
        """`host` is what the worker listens on."""
        self._name, self._key, self._host, self._port = name, key, host, port
        self._network: Zeroconf | None = None
        self._failed = False
        self._over = Event()
        self._thread = Thread(target=self._keep, name="announce", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say goodbye."""
        self._over.set()
        self._thread.join(_STOP_S)

    def _keep(self) -> None:
        """Announce, and anew wherever this machine has other addresses than before."""
        announced: Sequence[str] = ()
        while not self._over.is_set():
            hosts = _hosts(self._host)
            if hosts != announced or self._failed:
                self._hush()
                self._announce(hosts)
                announced = hosts
            self._over.wait(_AGAIN_S if self._failed else _LOOK_S)
        self._hush()

    def _announce(self, hosts: Sequence[str]) -> None:
        try:
            if hosts:
                self._register(Announcement(self._name, self._key, self._port, tuple(hosts)))
            self._failed = False
        except Exception as error:  # noqa: BLE001 - a network without multicast, a firewall: addresses do as well
            if not self._failed:
                log.warning(
                    "this worker is not announced in the network (%s); give masters its address", error or "no reason"
                )
            self._failed = True

    def _register(self, said: Announcement) -> None:
        from zeroconf import ServiceInfo, Zeroconf

        logging.getLogger("zeroconf").setLevel(logging.ERROR)  # it warns of each packet that a network in change drops
        self._network = Zeroconf(interfaces=list(said.hosts))
        self._network.register_service(
            ServiceInfo(
                SERVICE, said.instance, port=said.port, addresses=said.packed_hosts, properties=said.properties
            ),
            allow_name_change=True,
        )  # fmt: skip

    def _hush(self) -> None:
        """Say goodbye, where anybody can hear it: the addresses from which it would be said may be gone."""
        network, self._network = self._network, None
        try:
            if network is not None:
                network.close()
        except Exception as error:  # noqa: BLE001 - nobody waits for it
            log.debug("no goodbye was said: %s", error)


def _hosts(host: str) -> Sequence[str]:
    """The addresses at which others can reach whoever listens on `host`, in order."""
    if host not in _EVERYWHERE:
        return [host.strip("[]")]
    import ifaddr

    found = {str(ip.ip) for adapter in ifaddr.get_adapters() for ip in adapter.ips if ip.is_IPv4}
    return sorted(one for one in found if not one.startswith("127."))

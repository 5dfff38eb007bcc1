"""Announcements that are still being read when nobody waits for them any more: the network is closed under them."""

from typing import Any

import pytest

from master.joining.discovery import _Listener


class Network:
    """Fails as zeroconf does once it is closed; `closes` is closed while it is asked."""

    def __init__(self, closes: _Listener | None = None) -> None:
        self.asked, self._closes = 0, closes

    def get_service_info(self, kind: str, name: str, timeout: int) -> None:
        self.asked += 1
        if self._closes is not None:
            self._closes.over.set()
        raise AssertionError("Zeroconf instance loop must be running, was it already stopped?")


def test_a_network_that_is_closed_while_it_is_asked_is_nobodys_failure() -> None:
    listener = _Listener([])
    network: Any = Network(listener)
    listener.add_service(network, "kind", "stranger")
    listener.add_service(network, "kind", "another")  # and is not asked again
    assert network.asked == 1


def test_any_other_failure_is_said() -> None:
    network: Any = Network()
    with pytest.raises(AssertionError, match="loop must be running"):
        _Listener([]).add_service(network, "kind", "stranger")

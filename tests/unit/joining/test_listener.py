"""Announcements that are still being read when discovery ends and the network is closed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from zeroconf import EventLoopBlocked, NotRunningException

from master.joining.discovery import _Listener, find_workers, workers_at_home
from tests.support.cluster.key_helpers import locked, trust
from tpi.errors import TpiError
from tpi.keys.identity import load_identity
from tpi.keys.text import key_text


class Network:
    """A network that fails like zeroconf once it is closed; it is closed while `closes` is read."""

    def __init__(self, closes: _Listener | None = None) -> None:
        self.asked, self._closes = 0, closes

    def get_service_info(self, kind: str, name: str, timeout: int) -> None:
        self.asked += 1
        if self._closes is not None:
            self._closes.over.set()
        raise AssertionError("Zeroconf instance loop must be running, was it already stopped?")


def test_closing_a_network_during_a_search_is_no_failure() -> None:
    listener = _Listener([])
    network: Any = Network(listener)
    listener.add_service(network, "kind", "stranger")
    listener.add_service(network, "kind", "another")  # and is not asked again
    assert network.asked == 1


def test_any_other_failure_is_said() -> None:
    network: Any = Network()
    with pytest.raises(AssertionError, match="loop must be running"):
        _Listener([]).add_service(network, "kind", "stranger")


class Busy:
    """zeroconf on a machine that is too busy from some call on; it finds one worker."""

    fails = "close"
    key = b""

    def __init__(self, interfaces: object) -> None:
        if self.fails == "open":
            raise NotRunningException

    def get_service_info(self, kind: str, name: str, timeout: int) -> Any:
        properties = {b"key": key_text(self.key).encode(), b"name": b"laptop"}
        return SimpleNamespace(properties=properties, port=9990, parsed_scoped_addresses=lambda: ["192.0.2.7"])

    def close(self) -> None:
        raise EventLoopBlocked


class Browser:
    def __init__(self, network: Any, kind: str, listener: Any) -> None:
        listener.add_service(network, kind, "laptop")


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Busy]:
    """A network on which a paired laptop announces itself; `tmp_path / "here"` has this machine's keys."""
    trust(tmp_path / "here", tmp_path / "laptop")
    monkeypatch.setattr(Busy, "key", load_identity(tmp_path / "laptop").public)
    monkeypatch.setattr("zeroconf.Zeroconf", Busy)
    monkeypatch.setattr("zeroconf.ServiceBrowser", Browser)
    return Busy


def test_a_network_that_cannot_be_closed_has_been_heard(tmp_path: Path, busy: type[Busy]) -> None:
    assert [one.hosts for one in find_workers(locked(tmp_path / "here"))] == [("192.0.2.7",)]


def test_a_failure_to_listen_is_reported_and_ends_no_run(
    tmp_path: Path, busy: type[Busy], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(busy, "fails", "open")
    with pytest.raises(TpiError, match="cannot listen for announcements"):
        find_workers(locked(tmp_path / "here"))
    assert workers_at_home(locked(tmp_path / "here"), lambda text: None) == []
    said = "cannot listen for announcements of workers (NotRunningException); name workers with --workers"
    assert said in capsys.readouterr().err

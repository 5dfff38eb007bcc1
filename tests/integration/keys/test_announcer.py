"""A worker announces its present addresses: they may change, and networks may fail for a while."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from master.joining.discovery import find_workers
from tests.support.cluster.key_helpers import pair_folders
from tests.support.house import until
from tpi.keys.announcement import Announcement
from tpi.keys.identity import load_identity
from tpi.keys.policy import KeyPolicy
from worker.service import announce
from worker.service.announce import Announcer

KEY = b"\1" * 32


class Machine:
    """A machine whose present addresses a test sets."""

    def __init__(self, *hosts: str) -> None:
        self.hosts: Sequence[str] = hosts

    def __call__(self, host: str) -> Sequence[str]:
        return self.hosts


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine("127.0.0.1")
    monkeypatch.setattr(announce, "_hosts", found)
    monkeypatch.setattr(announce, "_CHECK_S", 0.02)
    monkeypatch.setattr(announce, "_RETRY_S", 0.02)
    return found


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Record the addresses of each announcement instead of sending it; empty ones fail."""
    said = list[tuple[str, ...]]()

    def register(self: Announcer, one: Announcement) -> None:
        said.append(one.hosts)
        if one.hosts == ("fails",):
            raise RuntimeError("no multicast here")

    monkeypatch.setattr(Announcer, "_register", register)
    return said


def test_a_new_address_is_announced(tmp_path: Path, machine: Machine) -> None:
    """The announcement goes by mDNS over this machine's loopback."""
    here, there = tmp_path / "here", tmp_path / "there"
    pair_folders(here, there)

    def heard() -> list[tuple[str, ...]]:
        found = find_workers(KeyPolicy(there, lambda host: True), seconds=2, interfaces=["127.0.0.1"])
        return [one.hosts for one in found]

    announcer = Announcer("laptop", load_identity(here).public, "0.0.0.0", 9990)
    try:
        for hosts in ("127.0.0.1",), ("127.0.0.1", "127.0.0.2"), ("127.0.0.2",):
            machine.hosts = hosts
            until(lambda hosts=hosts: [tuple(sorted(each)) for each in heard()] == [hosts])  # type: ignore[misc]
    finally:
        announcer.close()
    assert not announcer._thread.is_alive()
    assert heard() == []


def test_announcing_begins_when_there_is_a_network(machine: Machine, registered: list[tuple[str, ...]]) -> None:
    machine.hosts = ()
    announcer = Announcer("laptop", KEY, "0.0.0.0", 9990)
    machine.hosts = ("10.0.0.7",)
    until(lambda: registered == [("10.0.0.7",)])
    announcer.close()


def test_a_network_that_fails_is_said_once_and_tried_again(
    machine: Machine, registered: list[tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    machine.hosts = ("fails",)
    with caplog.at_level(logging.WARNING):
        announcer = Announcer("laptop", KEY, "0.0.0.0", 9990)
        until(lambda: len(registered) > 2)
        machine.hosts = ("10.0.0.7",)
        until(lambda: ("10.0.0.7",) in registered)
        announcer.close()
    assert [record.getMessage() for record in caplog.records] == [
        "cannot announce this worker in the network (no multicast here); give masters its address"
    ]


def test_a_network_that_cannot_be_closed_is_left(machine: Machine, registered: list[tuple[str, ...]]) -> None:
    class Broken:
        def close(self) -> None:
            raise TimeoutError

    announcer = Announcer("laptop", KEY, "0.0.0.0", 9990)
    until(lambda: bool(registered))
    broken: Any = Broken()
    announcer._network = broken
    machine.hosts = ("10.0.0.7",)
    until(lambda: registered[-1] == ("10.0.0.7",))
    announcer.close()
    assert not announcer._thread.is_alive()

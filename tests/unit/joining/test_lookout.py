"""A laptop that sleeps, wakes, and changes its address is found by its key."""

from queue import Empty, SimpleQueue

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zeroconf import EventLoopBlocked

from master.joining import discoverythread
from master.joining.discoverythread import DiscoveryThread
from master.joining.shares import Shares
from master.workers.places import WorkerId
from tpi.keys.announcement import SERVICE, Announcement, read_announcement
from tpi.keys.text import KEY_BYTES

LAPTOP, OTHER = b"\1" * KEY_BYTES, b"\2" * KEY_BYTES


def test_laptop_sleeps_and_wakes_changes_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discoverythread, "_EVERY_S", 0.01)
    sought: SimpleQueue[str] = SimpleQueue()
    said = [Announcement("laptop", LAPTOP, 9990, ("192.0.2.9", "fd00::9")), Announcement("other", OTHER, 1, ("h",))]
    looking = DiscoveryThread(lambda: said, lambda address, key: sought.put(address))
    looking.miss([b""])  # no worker that could be recognised
    with pytest.raises(Empty):
        sought.get(timeout=0.1)
    looking.miss([LAPTOP])
    assert {sought.get(timeout=10), sought.get(timeout=10)} == {"192.0.2.9:9990", "[fd00::9]:9990"}
    looking.found([LAPTOP])
    looking.close()
    while not sought.empty():
        assert sought.get() in ("192.0.2.9:9990", "[fd00::9]:9990")


@given(st.text(max_size=80), st.binary(min_size=32, max_size=32), st.integers(1, 65535))
def test_what_is_announced_is_read_again(name: str, key: bytes, port: int) -> None:
    said = Announcement(name, key, port, ("192.0.2.1", "fd00::1"))
    assert len(said.instance.removesuffix(f".{SERVICE}").encode()) <= 63
    record = {one.encode(): other.encode(errors="replace") for one, other in said.properties.items()}
    again = read_announcement(record, port, ["192.0.2.1", "fd00::1", "fe80::1%eth0"])
    assert again is not None
    assert (again.key, again.port, again.hosts) == (key, port, said.hosts)


@given(
    st.dictionaries(st.sampled_from([b"key", b"name", b"x"]), st.none() | st.binary(max_size=80)), st.integers(0, 70000)
)
def test_nonsense_is_no_announcement(record: dict[bytes, bytes | None], port: int) -> None:
    found = read_announcement(record, port, ["192.0.2.1"])
    assert found is None or (len(found.key) == KEY_BYTES and 0 < found.port < 65536)


def test_a_worker_started_later_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discoverythread, "_EVERY_S", 0.01)
    monkeypatch.setattr(discoverythread, "_SELDOM_S", 0.02)
    said, heard = list[Announcement](), SimpleQueue[tuple[str, bytes]]()
    looking = DiscoveryThread(lambda: said, lambda address, key: heard.put((address, key)))
    looking.welcome()
    with pytest.raises(Empty):
        heard.get(timeout=0.1)
    said.append(Announcement("other", OTHER, 1, ("h",)))
    assert heard.get(timeout=10) == ("h:1", OTHER)
    looking.close()


def test_a_failed_search_is_reported_once_and_lookout_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """zeroconf raises plain exceptions, and a busy machine can cause them."""
    monkeypatch.setattr(discoverythread, "_EVERY_S", 0.01)
    heard: SimpleQueue[str] = SimpleQueue()
    said_by_laptop = [Announcement("laptop", LAPTOP, 1, ("h",))]
    answers: list[Exception | list[Announcement]] = [EventLoopBlocked(), EventLoopBlocked(), said_by_laptop]

    def find() -> list[Announcement]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, list):
            return answer
        raise answer

    looking = DiscoveryThread(find, lambda address, key: heard.put(address))
    looking.miss([LAPTOP])
    assert heard.get(timeout=10) == "h:1"
    looking.close()
    said = capsys.readouterr().err
    assert said == "tpi: looking for machines in the network failed (EventLoopBlocked); it is tried again\n"


A, B = WorkerId("a:1"), WorkerId("b:1")


def test_shares_go_with_workers() -> None:
    asked = Shares.of([3, 2, 1], [A, B])
    assert asked.among([A, B]) == [3, 2, 1]
    assert asked.among([B]) == [3, 1]
    assert asked.among([WorkerId("c:1"), B]) == [3, 1.5, 1]
    assert asked.among([]) == [3]
    assert Shares.of([0, 1], [A]).among([]) == [1.0]


def test_a_laptop_at_another_address_has_its_share() -> None:
    asked = Shares.of([3, 2, 1], [WorkerId("a:1", LAPTOP), WorkerId("b:1", OTHER)])
    assert asked.among([WorkerId("c:1", LAPTOP), WorkerId("b:1", OTHER)]) == [3, 2, 1]
    assert asked.among([WorkerId("b:1", LAPTOP), WorkerId("a:1", OTHER)]) == [3, 2, 1]  # they have changed places

"""Listening sockets: the server's addresses, how they are printed, and the options of connections."""

import ipaddress
import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from master.api import listening as module
from master.api.listening import Listening, is_own, listen
from master.api.run import welcome
from tpi.errors import UsageError


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


IPV6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def reaches(address: str, listening: Listening) -> bool:
    try:
        socket.create_connection((address, listening.port), timeout=10).close()
    except OSError:
        return False
    return True


def machine(monkeypatch: pytest.MonkeyPatch, **interfaces: list[str]) -> None:
    """Give this machine interfaces with these addresses, all up except `down`."""

    def family(address: str) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in address else socket.AF_INET

    addresses: Any = {
        name: [SimpleNamespace(family=family(one), address=one) for one in found] for name, found in interfaces.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {n: SimpleNamespace(isup=n != "down") for n in interfaces})


def test_a_body_does_not_wait_until_headers_are_acknowledged() -> None:
    """With delayed ACKs, Nagle's algorithm would delay the second small write of a connection by 40 ms."""
    with listen("127.0.0.1", 0) as listening, socket.create_connection(("127.0.0.1", listening.port)):
        accepted, _ = listening.sockets[0].accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


@pytest.mark.parametrize("host", ["192..168.1.7", "none.invalid", "", "203.0.113.9"])
def test_a_host_that_is_not_of_this_machine_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match="--host"):
        listen(host, 0)


def test_a_port_in_use_is_refused() -> None:
    with listen("127.0.0.1", 0) as first, pytest.raises(UsageError, match="in use; give another --host or --port"):
        listen("127.0.0.1", first.port)


@IPV6
def test_all_addresses_are_ipv4_and_ipv6() -> None:
    with listen("::", 0) as listening:
        assert reaches("127.0.0.1", listening)
        assert reaches("::1", listening)
        clients = [one.accept() for one in listening.sockets]
    for connection, _ in clients:
        connection.close()
    assert {at[0] for _, at in clients} == {"127.0.0.1", "::1"}  # IPv4 clients are not known by mapped addresses


@IPV6
def test_a_taken_ipv4_port_is_not_hidden_by_ipv6() -> None:
    with listen("0.0.0.0", 0) as first, pytest.raises(UsageError, match="in use"):
        listen("::", first.port)


@IPV6
def test_a_name_listens_at_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo
    found = [answer for host in ("::1", "127.0.0.1", "203.0.113.9") for answer in real(host, None)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: found if host == "box" else real(host, *a, **k))
    with listen("box", 0) as listening:
        assert reaches("::1", listening)
        assert reaches("127.0.0.1", listening)
        assert listening.urls() == [f"http://box:{listening.port}"]


@pytest.mark.parametrize(
    ("host", "urls"),
    [
        ("127.0.0.1", ["http://127.0.0.1"]),
        ("0.0.0.0", ["http://127.0.0.1", "http://192.168.1.7", "http://10.0.0.4"]),
        pytest.param(
            "::",
            ["http://127.0.0.1", "http://[::1]", "http://192.168.1.7", "http://10.0.0.4", "http://[fd00::7]"],
            marks=IPV6,
        ),
        pytest.param("0:0:0:0:0:0:0:1", ["http://[::1]"], marks=IPV6),
        ("localhost", ["http://localhost"]),
    ],
)
def test_addresses_that_are_said_are_those_that_work(
    host: str, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(
        monkeypatch,
        wlan0=["fe80::1%wlan0", "fd00::7%wlan0", "192.168.1.7"],
        lo=["127.0.0.1", "::1"],
        eth0=["10.0.0.4"],
        down=["172.17.0.1"],
    )
    with listen(host, 0) as listening:
        assert listening.urls() == [f"{url}:{listening.port}" for url in urls]


@pytest.mark.parametrize("host", ["0.0.0.0", *(pytest.param(one, marks=IPV6) for one in ("::", "[::]"))])
def test_each_address_of_this_machine_that_is_said_answers(host: str) -> None:
    with listen(host, 0) as listening:
        for url in listening.urls():
            address = url.removeprefix("http://").rsplit(":", 1)[0].strip("[]")
            assert not ipaddress.ip_address(address).is_unspecified
            assert reaches(address, listening), url


def test_port_0_finds_a_port_that_is_free_at_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []
    real = module._bound

    def taken_twice(addresses: Any, port: int) -> list[socket.socket]:
        tries.append(port)
        if len(tries) < 3:
            raise OSError(98, "Address already in use")
        return real(addresses, port)

    monkeypatch.setattr(module, "_bound", taken_twice)
    with listen("127.0.0.1", 0):
        assert len(tries) == 3


def test_the_welcome_has_the_page_and_the_base_of_the_api() -> None:
    said = welcome("tiny", ["http://127.0.0.1:80", "http://[fd00::7]:80"], 64, needs_key=True).splitlines()
    assert said[0] == "tiny is served at http://127.0.0.1:80; context of 64 tokens"
    assert said[1].split() == ["page", "http://127.0.0.1:80/", "API", "http://127.0.0.1:80/v1"]
    assert said[2].split() == ["page", "http://[fd00::7]:80/", "API", "http://[fd00::7]:80/v1"]
    assert "API key" in said[3]
    assert "key" not in welcome("tiny", ["http://127.0.0.1:80"], 64, needs_key=False)


def test_own_hosts() -> None:
    assert all(map(is_own, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")))
    assert not any(map(is_own, ("0.0.0.0", "::", "[::]", "192.168.1.7", "box", "")))

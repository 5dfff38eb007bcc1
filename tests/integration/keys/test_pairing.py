"""Two machines come to trust each other by a code that is good for one guess, and no other machine does."""

import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import ifaddr
import pytest
from click.testing import CliRunner

from tpi.errors import PairingError, TpiError, UsageError
from tpi.keys import commands, exchange, pairing
from tpi.keys.exchange import as_guest, as_host, new_code
from tpi.keys.identity import load_identity
from tpi.keys.pairing import accept, invite, listen, own_introduction
from tpi.keys.pairinglistener import PairingListener
from tpi.keys.policy import KeyPolicy
from tpi.keys.ring import KeyRing, PairedKey


class Host:
    """A machine that waits for another one in a thread; `codes` are the codes that it showed."""

    def __init__(self, folder: Path, wait_s: float = 30) -> None:
        self.codes: list[str] = []
        self.problem: TpiError | None = None
        self._door = KeyPolicy(folder)
        self._listener = listen("127.0.0.1", 0)
        self.port: int = self._listener.getsockname()[1]
        self._wait_s = wait_s
        self._thread = Thread(target=self._run)

    def _run(self) -> None:
        try:
            invite(self._listener, self._door, own_introduction(self._door, "host"), self.codes.append, self._wait_s)
        except PairingError as error:
            self.problem = error

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._listener.close()

    def code(self, number: int = -1) -> str:
        while len(self.codes) < (number + 1 or 1):
            self._thread.join(0.01)
        return self.codes[number]


@contextmanager
def waiting(folder: Path, wait_s: float = 30) -> Iterator[Host]:
    host = Host(folder, wait_s)
    host.start()
    try:
        yield host
    finally:
        host.join()


def guess(host: Host, folder: Path, code: str) -> None:
    policy = KeyPolicy(folder)
    accept("127.0.0.1", host.port, code, policy, own_introduction(policy, "guest"))


def wrong(code: str) -> str:
    digits = code.replace("-", "")
    return f"{(int(digits) + 1) % 10**6:06}"


def test_a_code_makes_both_trust_each_other(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with waiting(here) as host:
        assert re.fullmatch(r"\d{3}-\d{3}", host.code())
        guess(host, there, host.code().replace("-", " "))
    (mine,), (theirs,) = KeyRing(here).read().paired, KeyRing(there).read().paired
    assert (mine.name, mine.key, mine.host) == ("guest", load_identity(there).public, "127.0.0.1")
    assert (theirs.name, theirs.key, theirs.host) == ("host", load_identity(here).public, "127.0.0.1")


def test_a_code_is_good_for_one_guess(tmp_path: Path) -> None:
    """After a wrong guess, the code that was shown is no longer valid."""
    here, there = tmp_path / "here", tmp_path / "there"
    with waiting(here) as host:
        first = host.code()
        with pytest.raises(PairingError, match="the code is wrong"):
            guess(host, tmp_path / "thief", wrong(first))
        second = host.code(1)
        assert second != first
        with pytest.raises(PairingError, match="the code is wrong"):
            guess(host, tmp_path / "thief", first)
        guess(host, there, host.code(2))
    assert [one.name for one in KeyRing(here).read().paired] == ["guest"]
    assert KeyRing(tmp_path / "thief").read().paired == ()


@pytest.mark.parametrize("code", ["12345", "1234567", "", "abc-def", "٤٨٢-١٩٣"])
def test_what_cannot_be_a_code_costs_no_guess(tmp_path: Path, code: str) -> None:
    with waiting(tmp_path / "here") as host:
        with pytest.raises(UsageError, match="is not a code; give the 6 digits"):
            guess(host, tmp_path / "there", code)
        guess(host, tmp_path / "there", host.code())
    assert len(host.codes) == 1


def test_a_new_code_comes_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def guessed_once(listener: object, policy: KeyPolicy, own: object, show: Callable[[str], None]) -> PairedKey:
        show("111-111")
        show("222-222")
        return PairedKey("guest", bytes(32))

    monkeypatch.setenv("TPI_CONFIG", str(tmp_path))
    monkeypatch.setattr(pairing, "invite", guessed_once)
    lines = CliRunner().invoke(commands.pair, ["--listen", "127.0.0.1:0"]).output.splitlines()
    assert [line[-7:] for line in lines if line.startswith("tpi pair ")] == ["111-111", "222-222"]
    assert sum("wrong code" in line for line in lines) == 1
    assert "wrong code" in lines[2]


def test_without_a_route_the_address_is_shown_and_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoRoute(socket.socket):
        def connect(self, address: object) -> None:
            raise OSError("Network is unreachable")

    addresses = [ifaddr.IP(ip, 24, "") for ip in ("127.0.0.1", "10.77.0.2")]
    monkeypatch.setattr(socket, "socket", NoRoute)
    monkeypatch.setattr(ifaddr, "get_adapters", lambda: [ifaddr.Adapter("", "", addresses)])
    assert commands._shown("0.0.0.0") == "10.77.0.2"
    monkeypatch.setattr(ifaddr, "get_adapters", list)
    assert commands._shown("0.0.0.0") == socket.gethostname()


@pytest.mark.parametrize("pairs", [as_host, as_guest])
def test_a_dripping_client_delays_no_other(
    tmp_path: Path, pairs: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time, but a whole message would take for ever."""
    now = [0.0]
    monkeypatch.setattr(exchange, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(socket.socket):
        def recv(self, *_: object) -> bytes:
            now[0] += 1.0
            return b"t"

        def sendall(self, *_: object) -> None:
            pass

    with Slow() as link:
        own = own_introduction(KeyPolicy(tmp_path), "host")
        with pytest.raises(TimeoutError, match="did not answer in time"):
            pairs(link, "482-193", own, lasts_s=2.0)
    assert now[0] == 2.0


def test_what_cannot_be_a_name_is_said_so(tmp_path: Path) -> None:
    policy = KeyPolicy(tmp_path)
    with pytest.raises(UsageError, match=r"'192\.\.168\.1\.7' is not a host name or address"):
        accept("192..168.1.7", 9993, "482-193", policy, own_introduction(policy))


def test_repeated_guesses_end_the_pairing(tmp_path: Path) -> None:
    with waiting(tmp_path / "here") as host:
        for number in range(3):
            with pytest.raises(PairingError, match="the code is wrong"):
                guess(host, tmp_path / "thief", wrong(host.code(number)))
    assert host.problem is not None
    assert "3 wrong codes" in str(host.problem)
    assert KeyRing(tmp_path / "here").read().paired == ()


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"tpi pairs 1\n", b"tpi pairs 1\n\xff\xff" + bytes(70000),
             b"tpi pairs 1\n\x00\x21" + bytes(33), b"tpi pairs 1\n\x00\x21B" + bytes(32)],
)  # fmt: skip
def test_nonsense_costs_no_guess(tmp_path: Path, said: bytes) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with waiting(here) as host:
        code = host.code()
        with socket.create_connection(("127.0.0.1", host.port)) as raw:
            raw.sendall(said)
        guess(host, there, code)
    assert len(host.codes) == 1
    assert [one.name for one in KeyRing(here).read().paired] == ["guest"]


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400\r\n\r\n", b"tpi pairs 1\n\x00\x21A" + bytes(32)])
def test_an_impostor_is_not_trusted(tmp_path: Path, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend() -> None:
            link, _ = server.accept()
            with closing(link):
                link.sendall(answer)
                link.recv(65536)

        thread = Thread(target=pretend)
        thread.start()
        policy = KeyPolicy(tmp_path)
        with pytest.raises(PairingError):
            accept("127.0.0.1", server.getsockname()[1], "123456", policy, own_introduction(policy))
        thread.join()
    assert KeyRing(tmp_path).read().paired == ()


def test_no_worker_comes(tmp_path: Path) -> None:
    with waiting(tmp_path, wait_s=0.1) as host:
        pass
    assert "no machine connected" in str(host.problem)
    policy = KeyPolicy(tmp_path)
    with pytest.raises(PairingError, match="cannot be reached"):
        accept("127.0.0.1", host.port, "123456", policy, own_introduction(policy))


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this system has no IPv6")
def test_a_wildcard_of_ipv6_takes_ipv4_too() -> None:
    """The address that is shown may be an IPv4 address."""
    with listen("[::]", 0) as listener:
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=5).close()


def test_codes_are_drawn_anew() -> None:
    drawn: Callable[[], str] = new_code
    assert len({drawn() for _ in range(50)}) > 40


def test_silent_connections_delay_no_pairing(tmp_path: Path) -> None:
    """A connection that stops after one byte is closed after a short time."""
    here, there = tmp_path / "here", tmp_path / "there"
    with waiting(here) as host, ExitStack() as stack:
        code = host.code()
        for said in (b"", b"", b"t", b""):
            idle = stack.enter_context(socket.create_connection(("127.0.0.1", host.port)))
            idle.sendall(said)
        guess(host, there, code)
    assert len(host.codes) == 1
    assert [one.name for one in KeyRing(here).read().paired] == ["guest"]


def test_the_oldest_of_too_many_silent_connections_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpi.keys.pairinglistener._MOST_SILENT", 2)
    with listen("127.0.0.1", 0) as listener, closing(PairingListener(listener)) as guests, ExitStack() as stack:
        links = [stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(4)]
        links[3].sendall(b"t")
        came = guests.next(time.monotonic() + 60)
        assert came is not None
        with came[0]:
            assert came[0].getpeername() == links[3].getsockname()
        assert links[0].recv(1) == b""
    assert guests.next(time.monotonic()) is None

"""A worker that cannot be reached: the error comes at once if the system reports it at once, with the reason."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from master.options import RunOptions
from master.session import Session
from master.workers.asking import ask
from master.workers.cluster import Cluster
from master.workers.local import LocalWorkers
from master.workers.reach import listen_example, obstacle
from tests.support.models import TinyModel
from tpi.errors import NodeLost, PlanError
from tpi.net.sockets import COLLECTIVE, CONTROL, Net

_LONG_S = 60.0  # an upper limit that is not reached: what is met ends the wait


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_a_port_without_a_listener_is_refused_at_once() -> None:
    address = f"127.0.0.1:{_free_port()}"
    with pytest.raises(NodeLost, match=rf"{address} \(connection refused\).*tpi worker --listen 0\.0\.0\.0:\d+"):
        Cluster.connect([address], timeout_s=_LONG_S)


def test_an_unknown_host_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(NodeLost, match="there is no host called 'no-such-laptop'"):
        Cluster.connect(["no-such-laptop:9990"], timeout_s=_LONG_S)


def test_an_address_without_a_route_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nowhere(socket.socket):
        def connect(self, address: object) -> None:
            raise OSError(113, "No route to host")

    monkeypatch.setattr(socket, "socket", Nowhere)
    assert obstacle("192.0.2.1", 9990).startswith("192.0.2.1:9990 cannot be reached (No route to host)")


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_something_else_that_answers_is_told_from_a_worker(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                connection, _ = server.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        try:
            with pytest.raises(NodeLost, match=f"not a tpi worker answers at {address}"):
                Cluster.connect([address], timeout_s=_LONG_S)
        finally:
            over.set()
            socket.create_connection(server.getsockname()).close()
            thread.join()


def test_another_port_of_a_worker_is_told_from_its_first() -> None:
    net = Net()
    _, port = net.bind(COLLECTIVE, "127.0.0.1", 0)
    address = f"127.0.0.1:{port}"
    said = f"a program answers at {address}, but not as a tpi worker; give the port that the worker prints first"
    with pytest.raises(NodeLost, match=said):
        Cluster.connect([address], timeout_s=1.0)
    (asked,) = ask(net, [address], seconds=1.0)
    assert asked.problem.startswith(said)
    net.close()


def test_a_worker_is_no_obstacle() -> None:
    net = Net()
    _, port = net.bind(CONTROL, "127.0.0.1", 0)
    assert obstacle("127.0.0.1", port) == ""
    net.close()


def test_the_way_out_fits_the_address() -> None:
    assert listen_example("192.168.1.7:9990") == "tpi worker --listen 0.0.0.0:9990"
    assert listen_example("[fe80::1]:9990") == "tpi worker --listen [::]:9990"


def test_more_nodes_than_units_are_refused_before_any_starts(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(_: LocalWorkers) -> LocalWorkers:
        raise AssertionError("workers were started")

    monkeypatch.setattr(LocalWorkers, "__enter__", started)
    placement = RunOptions(model=str(tiny_model("llama").directory), cache=tmp_path, local=40)
    with pytest.raises(PlanError, match="too few for 41 nodes; use at most"), Session(placement):
        pass
    assert not (tmp_path / "packs").exists()

"""The reason why a worker cannot be reached, if the system knows it at once.

libzmq retries in the background without reporting the reason, so this module tries a plain connection.
"""

import errno
import os
import socket
from threading import Thread

_GREETING = b"\xff" + bytes(7) + b"\x01\x7f"  # ZMTP 3.1: how either side of a connection begins
_HTTP = b"\r\n\r\n"  # bytes that make a web server answer; a worker ignores them
_ANSWER_S = 2.0


def listen_example(address: str) -> str:
    """Return the command that makes a worker reachable at `address` (HOST:PORT)."""
    host, _, port = address.rpartition(":")
    return f"tpi worker --listen {'[::]' if ':' in host else '0.0.0.0'}:{port}"


def other_port(address: str) -> str:
    """Return the sentence for an `address` that takes a master's connection, and then does not answer as a worker."""
    return (
        f"a program answers at {address}, but not as a tpi worker; give the port that the worker prints first at its "
        "start, not its collective or weights port"
    )


def obstacle(host: str, port: int) -> str:
    """Return the reason why the address cannot be reached; empty if unknown. `host` may be in brackets."""
    bare = host.strip("[]")
    where = f"{host}:{port}"
    try:
        family = socket.AF_INET6 if ":" in bare else socket.AF_INET
        address = socket.getaddrinfo(bare, port, family, socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError):
        return _unknown(bare, port)
    try:
        with socket.socket(*address[:3]) as probe:
            probe.settimeout(_ANSWER_S)
            probe.connect(address[4])
            return _other(probe, where)
    except TimeoutError:
        return ""
    except OSError as error:
        return _refusal(error, host, port)


class ReachProbe:
    """A call of `obstacle` on a thread, because looking up a name may take long."""

    def __init__(self, host: str, port: int) -> None:
        self.found = ""
        self._thread = Thread(target=self._look, args=(host, port), name="probe", daemon=True)
        self._thread.start()

    def _look(self, host: str, port: int) -> None:
        self.found = obstacle(host, port)

    def close(self) -> None:
        """Wait for the thread, but not for a slow name server."""
        self._thread.join(_ANSWER_S)


def _unknown(host: str, port: int) -> str:
    try:
        found = socket.getaddrinfo(host, port, socket.AF_INET6, socket.SOCK_STREAM)[0][4][0]
    except (socket.gaierror, UnicodeError):
        return f"there is no host called {host!r}; give the name or the address of the worker's machine as HOST:PORT"
    return f"{host} has an IPv6 address only; give it as [{found}]:{port}"


def _refusal(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.ECONNREFUSED:
        return (
            f"no worker answers at {host}:{port} (connection refused); start a worker on that machine with: "
            f"{listen_example(f'{host}:{port}')} (without --listen it accepts connections from its own machine only)"
        )
    reason = os.strerror(error.errno or 0)
    return f"{host}:{port} cannot be reached ({reason}); check the address, and that the machine is in this network"


def _other(probe: socket.socket, where: str) -> str:
    probe.sendall(_GREETING + _HTTP)
    answer = probe.recv(len(_GREETING))
    if answer.startswith(_GREETING[:1]):
        return ""
    return f"something that is not a tpi worker answers at {where}; give the port that the worker prints at its start"

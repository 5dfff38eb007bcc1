"""Requests to a running testbed: one JSON object per datagram over a Unix socket in its state directory."""

import json
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tpi.errors import TestbedError

_LARGEST = 65536
SOCKET = "control"


def listen(folder: Path) -> socket.socket:
    """Return the non-blocking socket on which the holder of the testbed at `folder` takes requests."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    server.bind(str(folder / SOCKET))
    (folder / SOCKET).chmod(0o600)
    return server


def answer(server: socket.socket, handlers: dict[str, Callable[..., Any]]) -> str | None:
    """Receive one waiting request, carry it out and send its result.

    Return the verb of the request, or None if no request was waiting or the request failed.
    """
    try:
        data, client = server.recvfrom(_LARGEST)
    except BlockingIOError:
        return None
    verb, reply = _carry_out(data, handlers)
    with suppress(OSError):  # the client may have ended
        server.sendto(json.dumps(reply).encode(), client)
    return verb


def _carry_out(data: bytes, handlers: dict[str, Callable[..., Any]]) -> tuple[str | None, dict[str, Any]]:
    try:
        request = json.loads(data)
        verb = request.pop("verb")
        return verb, {"result": handlers[verb](**request)}
    except Exception as error:  # noqa: BLE001  a bad request must not end the network of all devices
        return None, {"error": f"{type(error).__name__}: {error}"}


def ask(folder: Path, verb: str, timeout: float = 5.0, **fields: Any) -> Any:
    """Send a request to the testbed at `folder` and return its result.

    Raises:
        TestbedError: if there is no answer within `timeout` seconds, or the request is refused.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.bind("")  # the kernel chooses an abstract name, to which the answer is sent
        client.settimeout(timeout)
        try:
            client.connect(str(folder / SOCKET))
            client.send(json.dumps({"verb": verb, **fields}).encode())
            reply = json.loads(client.recv(_LARGEST))
        except OSError as error:
            raise TestbedError(
                f"testbed {folder.name} does not answer ({error}): run `tpi testbed down` to remove it"
            ) from error
    if "error" in reply:
        raise TestbedError(f"testbed {folder.name}: {verb}: {reply['error']}")
    return reply["result"]

"""Processes for tests of queues that are full: one that does not read, and one that writes until it is killed.

`python -m tests.support.processes.deaf` takes one of three words. `victim` binds every plane and prints the ports. It
reads nothing until a line comes on stdin, and then reads everything. `flood PORT ...` fills the queues of the control,
collective and weights planes at these ports, over several connections each, prints a line, and waits. `storm PORT`
sends messages of 6 bytes and requests to the control plane at PORT as fast as it can, until it is killed. It reads
nothing.
"""

import sys
import time
from collections.abc import Callable
from itertools import count

import zmq

from tpi import __version__
from tpi.net.codec import encode
from tpi.net.messages import Join, master_identity
from tpi.net.sockets import COLLECTIVE, CONTROL, WEIGHTS, Net

PLANES = (CONTROL, COLLECTIVE, WEIGHTS)
CONNECTIONS = 7  # of each plane
JUNK = bytes(1000)
_BLOWS = 1000  # of each connection, after which a storm has begun
_FULL_S = 0.3  # without a place in a queue


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def victim(net: Net) -> None:
    bound = [net.bind(plane, "127.0.0.1", 0) for plane in PLANES]
    _say(" ".join(str(port) for _, port in bound))
    sys.stdin.readline()
    for socket, _ in bound:
        while socket.poll(200):
            socket.recv_multipart()
    _say("read it all")
    sys.stdin.readline()


def flood(net: Net, *ports: int) -> None:
    names = [b"%d" % number for number in range(CONNECTIONS)]
    sockets = [
        net.connect(plane, "127.0.0.1", port, name)
        for plane, port in zip(PLANES, ports, strict=True)
        for name in names
    ]  # fmt: skip
    last = time.monotonic()
    while time.monotonic() - last < _FULL_S:
        for socket in sockets:
            if socket.poll(0, zmq.POLLOUT):
                socket.send(JUNK)
                last = time.monotonic()
    _say("full")
    sys.stdin.readline()


def storm(net: Net, port: int) -> None:
    sockets = [net.connect(CONTROL, "127.0.0.1", port, master_identity(number)) for number in range(CONNECTIONS)]
    asks = [bytes(frame) for frame in encode(Join(__version__, 0, "storm"))]
    for number in count():
        for session, socket in enumerate(sockets):
            if socket.poll(0 if number else 2000, zmq.POLLOUT):
                frames = [b"sixsix"] if session else [asks[0]]
                socket.send_multipart(frames)
        if number == _BLOWS:
            _say("blows")


if __name__ == "__main__":
    opened = Net()
    numbers = [int(port) for port in sys.argv[2:]]
    roles: dict[str, Callable[..., None]] = {"victim": victim, "flood": flood, "storm": storm}
    roles[sys.argv[1]](opened, *numbers)
    opened.close()

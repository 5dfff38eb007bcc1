"""Processes for tests of queues that are full: one that does not read, and one that writes until it is killed.

`python -m tests.deaf victim` binds every plane, prints the ports, and reads nothing before a line comes on stdin, and
then everything. `python -m tests.deaf flood PORT ...` fills the queues of the control, collective and weights planes
there, over several connections each, says so, and waits.
"""

import sys
import time

import zmq

from tpi.sockets import COLLECTIVE, CONTROL, WEIGHTS, Net

PLANES = (CONTROL, COLLECTIVE, WEIGHTS)
CONNECTIONS = 7  # of each plane
JUNK = bytes(1000)
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


def flood(net: Net, ports: list[int]) -> None:
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


if __name__ == "__main__":
    opened = Net()
    victim(opened) if sys.argv[1] == "victim" else flood(opened, [int(port) for port in sys.argv[2:]])
    opened.close()

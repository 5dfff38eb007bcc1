"""The baseline: a star allreduce over raw TCP sockets in Python, without the safeguards of a runtime.

It has no framing, fencing or deadlines: blocking sockets, one `sendall` and mostly one `recv_into` per payload and
worker, sums in rank order into a preallocated array.
"""

import socket

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


def receive(connection: socket.socket, view: memoryview) -> None:
    """Receive bytes until `view` is full."""
    done = 0
    while done < len(view):
        got = connection.recv_into(view[done:])
        if got == 0:
            raise ConnectionError("the other side closed the connection")
        done += got


def prepared(connection: socket.socket) -> socket.socket:
    """Disable Nagle's algorithm, which delays small messages, on `connection`, and return `connection`."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


class Master:
    """Rank 0, connected to the workers at `addresses`."""

    def __init__(self, addresses: list[tuple[str, int]]) -> None:
        self._workers = [prepared(socket.create_connection(address)) for address in addresses]
        self._part = np.empty(0, np.float32)
        self._total = np.empty(0, np.float32)

    def allreduce(self, partial: F32) -> F32:
        """Return the sum of the partial results of all ranks."""
        if self._total.size != partial.size:
            self._part, self._total = np.empty_like(partial), np.empty_like(partial)
        np.copyto(self._total, partial)
        for worker in self._workers:
            receive(worker, self._part.data.cast("B"))
            np.add(self._total, self._part, out=self._total)
        for worker in self._workers:
            worker.sendall(self._total.data.cast("B"))
        return self._total

    def close(self) -> None:
        """Close the connections."""
        for worker in self._workers:
            worker.close()


class Worker:
    """A rank other than 0, which waits for the master on `listener`."""

    def __init__(self, listener: socket.socket) -> None:
        self._master = prepared(listener.accept()[0])
        self._total = np.empty(0, np.float32)

    def allreduce(self, partial: F32) -> F32:
        """Return the sum of the partial results of all ranks."""
        if self._total.size != partial.size:
            self._total = np.empty_like(partial)
        self._master.sendall(partial.data.cast("B"))
        receive(self._master, self._total.data.cast("B"))
        return self._total

    def close(self) -> None:
        """Close the connection."""
        self._master.close()

"""Shared memory: the collective of nodes on one machine, as `--local` starts them.

It needs no socket and no kernel copy.

Every node writes its partial result to memory that all nodes have mapped (the board). Every node adds up all partial
results in rank order, in f32, so that all nodes hold the same bits. The memory has no name in any file system (memfd),
so nothing is left when its processes end.
"""

import mmap
import os
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

import numpy as np

from allreduce.base import F32, Endpoints, Group, GroupSpec
from allreduce.deadline import Deadlines
from allreduce.flight import Exchange
from tpi.errors import PlanError, UsageError

# values that each node can put on the board at once; a longer partial result is summed in several pieces
_VALUES = 1 << 16
_NAME = "tpi-allreduce"
_PREFIX = "memory:"
_SLICE_S = 0.1  # interval in seconds at which a wait checks its deadline


def available() -> bool:
    """Return True if nodes can sum through shared memory on this system: Linux, with the native module built."""
    return hasattr(os, "memfd_create") and find_spec("allreduce._shared") is not None


def board_bytes(size: int) -> int:
    """Return the bytes of shared memory through which `size` nodes sum.

    Each node counts all of it in its memory budget.
    """
    from allreduce._shared import Board

    return Board.bytes(size, _VALUES)


class BoardMemory:
    """The shared memory of a group, created by the master.

    Leaving the context closes its file, so that no further node can map it.
    """

    def __init__(self, size: int) -> None:
        """Create the memory for `size` nodes."""
        from allreduce._shared import Board

        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(self._file, Board.bytes(size, _VALUES))  # zeros; only pages that are written take memory

    @property
    def address(self) -> str:
        """Address by which other nodes map the memory; it is the address of rank 0 in `GroupSpec.peers`."""
        return f"{_PREFIX}{os.getpid()}:{self._file}"

    def __enter__(self) -> "BoardMemory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)


class Shared(Group):
    """A group of nodes on one machine that sum through shared memory, in rank order and in f32."""

    name = "shared"

    def __init__(self, spec: GroupSpec, endpoints: Endpoints) -> None:
        super().__init__(spec)
        if not available() or not spec.peers[0].address.startswith(_PREFIX):
            raise UsageError(
                "the collective 'shared' is for nodes that --local starts on a Linux machine; choose another "
                "--collective, such as mesh"
            )
        from allreduce._shared import Board

        self.wire = "f32"
        self._deadlines = Deadlines(spec, endpoints.watch, endpoints.lateness)
        self._spin_s = spec.spin_us * 1e-6
        memory = np.frombuffer(_map(spec.peers[0].address, Board.bytes(spec.size, _VALUES)), np.uint8)
        self._board: Board | None = Board(memory, spec.rank, spec.size, _VALUES)
        self._total = np.empty(0, np.float32)

    def _begin(self, step: int) -> None:
        """Do nothing: the memory belongs to one group, so it has no messages of others to drop."""

    def close(self) -> None:
        """Drop the reference to the shared memory."""
        self._board = None

    def _allreduce(self, values: F32) -> Exchange:
        yield
        assert self._board is not None
        values = values.reshape(-1)
        if self._total.size < values.size:
            self._total = np.empty(values.size, np.float32)
        total = self._total[: values.size]
        for first in range(0, values.size, _VALUES):
            self._board.lay(values[first : first + _VALUES])
            deadline = 0.0
            while (missing := self._board.take(total[first : first + _VALUES], self._spin_s, _SLICE_S)) >= 0:
                deadline = self._deadlines(missing, deadline)
        self.stats.sent_bytes += values.nbytes
        self.stats.received_bytes += values.nbytes * (self.size - 1)
        return total

    def _reduce(self, values: F32) -> Exchange:
        return self._allreduce(values)


def _map(address: str, nbytes: int) -> mmap.mmap:
    """Map the shared memory at `address`, which this process or its parent must have created.

    Raises:
        PlanError: if `address` names another file, or cannot be opened.
    """
    pid, _, number = address.removeprefix(_PREFIX).partition(":")
    path = Path(f"/proc/{pid}/fd/{number}")
    try:
        mine = int(pid) in (os.getpid(), os.getppid())
        if not mine or not str(path.readlink()).startswith(f"/memfd:{_NAME}"):
            raise PlanError(f"{address} is not the memory of a group on this machine")
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), nbytes)
    except (OSError, ValueError) as error:
        raise PlanError(f"the memory of the group, {address}, cannot be opened: {error}") from error

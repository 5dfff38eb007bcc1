"""A thread that looks for announcements of machines, such as a laptop that wakes up."""

from collections.abc import Callable, Collection, Iterable, Sequence
from threading import Event, Lock, Thread

from tpi.keys.announcement import Announcement
from tpi.system.threads.turns import Turns

_EVERY_S = 3.0  # seconds between two searches while a machine is missing
_SELDOM_S = 15.0
_STOP_S = 5.0


class DiscoveryThread:
    """A thread that finds the addresses of missing machines, or of all machines.

    It starts when the first machine is missing, or with `welcome`. Machines are identified by their keys.
    """

    def __init__(self, find: Callable[[], Sequence[Announcement]], seek: Callable[[str, bytes], None]) -> None:
        """Create the thread without starting it.

        `find` returns the announcements, after some seconds; `seek(address, key)` is called for each of them.
        """
        self._find, self._seek = find, seek
        self._missed: set[bytes] = set()
        self._all = False
        self._lock = Lock()
        self._over = Event()
        self._thread: Thread | None = None
        self._turns = Turns("looking for machines in the network")

    def miss(self, keys: Iterable[bytes]) -> None:
        """Look for the owners of `keys`.

        Empty keys are ignored: they belong to workers on this machine, which keep their addresses.
        """
        with self._lock:
            self._missed.update(key for key in keys if key)
            begin = bool(self._missed)
        if begin:
            self._begin()

    def welcome(self) -> None:
        """Look for all machines from now on, not only for missing ones."""
        self._all = True
        self._begin()

    def found(self, keys: Iterable[bytes]) -> None:
        """Stop looking for the owners of `keys`, which are back."""
        with self._lock:
            self._missed.difference_update(keys)

    def close(self) -> None:
        """Stop the thread that looks for workers."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._loop, name="lookout", daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        waited = 0.0
        while not self._over.wait(_EVERY_S):
            waited += _EVERY_S
            with self._lock:
                missed = frozenset(self._missed)
            if not missed and (not self._all or waited < _SELDOM_S):
                continue
            waited = 0.0
            with self._turns.one():
                self._look(missed)

    def _look(self, missed: Collection[bytes]) -> None:
        for one in self._find():
            if (self._all or one.key in missed) and not self._over.is_set():
                for address in one.addresses:
                    self._seek(address, one.key)

"""The time for which a worker reserves itself for a silent master, which may be asleep or may never return."""

from tpi.system.clocks import Awake, since_boot

YIELD_S = 10.0  # of silence, after which another master that calls is served
KEEP_S = 24 * 3600.0  # of silence, after which the plan is dropped even if no other master calls
_QUIET_S = 3.0  # a running master sends a message every second
_SLOW = 20  # factor by which heartbeats to a silent master are rarer


class Lease:
    """The time for which this worker stays with one master that has become silent."""

    def __init__(self) -> None:
        self._awake = Awake()
        self.renew()

    def renew(self) -> None:
        """Record that a message of the master arrived."""
        self._heard = self._awake()
        self._heard_at = since_boot()

    def may_be_replaced(self) -> bool:
        """Return True if the master has been silent for `YIELD_S` seconds, so that another master may take this worker.

        Time in which this machine was asleep does not count.
        """
        return self._awake() - self._heard > YIELD_S

    def is_silent(self) -> bool:
        """Return True if the master has been silent for longer than a running master would be."""
        return self._awake() - self._heard > _QUIET_S

    def has_expired(self) -> bool:
        """Return True if nothing came from the master for `KEEP_S` seconds: it is then taken to be lost.

        The time in which this machine slept counts too.
        """
        return since_boot() - self._heard_at > KEEP_S

    def heartbeat_divisor(self) -> int:
        """Return n if only every n-th heartbeat should be sent: 1, or 20 while the master is silent.

        Heartbeats that a master does not read would fill queues.
        """
        return _SLOW if self.is_silent() else 1

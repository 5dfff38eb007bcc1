"""How long a worker keeps a master that says nothing: the master may be asleep, or may never come back."""

from tpi.system.clocks import Awake, since_boot

YIELD_S = 10.0  # of silence, after which another master that asks is served
KEEP_S = 24 * 3600.0  # of silence, after which nobody need ask
_QUIET_S = 3.0  # a master that lives speaks every second
_SLOW = 20  # times as rarely, heartbeats go to a master that does not seem to read them


class Lease:
    """Of one master. Times are seconds."""

    def __init__(self) -> None:
        self._awake = Awake()
        self.renew()

    def renew(self) -> None:
        """The master was heard."""
        self._heard = self._awake()
        self._heard_at = since_boot()

    def yields(self) -> bool:
        """Whether another may have this worker now. Only silence counts that this process was awake to hear."""
        return self._awake() - self._heard > YIELD_S

    def quiet(self) -> bool:
        """Whether it says less than a master that lives, whose connection does."""
        return self._awake() - self._heard > _QUIET_S

    def over(self) -> bool:
        """Whether it has been silent for so long that it will not come back."""
        return since_boot() - self._heard_at > KEEP_S

    def pace(self) -> int:
        """Of how many heartbeats one is to be sent: what nobody reads fills queues."""
        return _SLOW if self.quiet() else 1

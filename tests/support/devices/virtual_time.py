"""The clock of emulated devices in tests: time passes only when threads sleep or work."""

from threading import local


class VirtualTime:
    """`real` and `sleep` for `tpi.devices.emulated.emulation.Emulation`; a sleeper wakes `late` seconds too late."""

    def __init__(self, late: float = 0.0) -> None:
        self.late = late
        self._threads = local()

    def real(self) -> float:
        now: float = getattr(self._threads, "now", 0.0)
        return now

    def sleep(self, seconds: float) -> None:
        self.pass_by(seconds + self.late)

    def pass_by(self, seconds: float) -> None:
        """Let `seconds` pass, in which the calling thread is busy or idle."""
        self._threads.now = self.real() + seconds

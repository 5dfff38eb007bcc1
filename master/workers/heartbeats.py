"""The state in a worker's heartbeats, and the length of a silence after which the worker counts as lost.

The silence of a worker that is not needed is ignored; it counts from the time when the worker is needed. All times are
`tpi.system.clocks.since_boot` seconds.
"""

import secrets
from dataclasses import dataclass, field

from tpi.net.fields import WindowState
from tpi.system.clocks import PAUSE_S

# seconds without a heartbeat, of which one is due every 0.25 s; longer on far links and after long pauses
SILENCE_S = 2.5
_STUTTER = 3  # a silence of 3 times the longest recent pause is tolerated
_FORGET = 0.98  # factor by which the longest pause decays per heartbeat
# TCP retransmits a lost packet after a round trip plus this time, and then after twice, four and eight times as long
# (RFC 6298, 2 and 5.5; Linux: TCP_RTO_MIN)
_TCP_VARIANCE_S, _TCP_TRIES = 0.2, 1 + 2 + 4 + 8
_FAR_S = (
    0.05  # a longer round trip means that packets may be lost: wired links of a home lose none, and WiFi retransmits
)
_FARTHEST_S = 1.0  # the longest round trip that is believed: a worker may also answer late for other reasons
_POLL_S = 0.5  # if the master looks less often than at this interval, pauses say nothing about the link
_RETRY_S = 120.0  # the longest pause between two attempts of TCP to send the same data (Linux: TCP_RTO_MAX)
_EXCHANGES, _APART_S = 4, 0.25  # exchanges that measure the round trip, and the time between two
_AGAIN_S = 5.0  # seconds between two further exchanges on a far link, and until a missing answer is ignored


@dataclass
class RoundTrip:
    """The round-trip time of a link: the shortest of several exchanges.

    A single exchange says little: the worker may answer late, or this process may notice the answer late. Therefore the
    master checks for answers more often, and keeps measuring a link while its round trip seems long.
    """

    seconds: float = 0.0  # 0: not known yet
    _number: int = 0  # number that the answer must carry; 0: no answer is due
    _sent: float = 0.0
    _next: float = 0.0
    _begun: int = 0

    @property
    def far(self) -> bool:
        """True if the link is so long that packets may be lost and sent again."""
        return self.seconds >= _FAR_S

    def due(self, now: float) -> bool:
        """Return True if it is time to measure the round trip again."""
        free = not self._number or now - self._sent > _AGAIN_S
        return now >= self._next and free and (self._begun < _EXCHANGES or self.far)

    def begin(self, now: float) -> int:
        """Begin a measurement. Return the number to send, which the worker sends back."""
        self._number, self._sent = 1 + secrets.randbits(63), now
        self._begun += 1
        self._next = now + (_APART_S if self._begun < _EXCHANGES else _AGAIN_S)
        return self._number

    def awaited(self, now: float) -> bool:
        """Return True while an answer is due. The caller must then look for it often, to measure when it arrives."""
        return bool(self._number) and now - self._sent < _FARTHEST_S

    def answered(self, number: int, now: float) -> None:
        """Record that the worker has sent `number` back. Numbers other than the last one sent are ignored."""
        if number and number == self._number:
            self._number = 0
            self.took(now - self._sent)

    def took(self, seconds: float) -> None:
        """Record an exchange that took `seconds`."""
        self.seconds = min(self.seconds or seconds, seconds)


@dataclass
class HeartbeatState:
    """The last state that a worker's heartbeats reported."""

    progress: int = -1
    phase: str = "idle"
    step: int = 0  # the running step, or the last one
    window: WindowState = field(default_factory=WindowState)
    missed: int = -1  # rank whose message is late in a sum while this worker waits for nothing else; -1: none
    advanced: float = 0.0  # time when `progress` last grew
    seen: float = 0.0  # time when anything was last received
    asked: float = 0.0  # time since which an answer is due
    looked: float = 0.0
    pause: float = 0.0  # the longest recent pause, decaying
    link: RoundTrip = field(default_factory=RoundTrip)  # tolerates far links before their first stutter
    _closely: bool = False  # whether the last two looks followed each other closely

    def look(self, now: float) -> None:
        """Record that the messages that arrived by time `now` are processed now.

        If this process stood still since the last call, the worker gets more time to answer.
        """
        gap = now - self.looked
        self._closely = gap < _POLL_S
        if self.looked and gap > PAUSE_S:  # this process stood still, so the gap is not the worker's
            # what it sent meanwhile may take as long again: TCP doubles the time between its attempts
            self.asked = now + min(gap, _RETRY_S)
            self.advanced += gap
        self.looked = now

    def ask(self, now: float) -> None:
        """Record that an answer of the worker is needed from `now` on."""
        self.asked = max(self.asked, now)

    def hear(self, now: float) -> None:
        """Record that a message arrived at time `now`."""
        if self.seen and self._closely:
            waited = now - max(self.seen, self.asked)
            self.pause = max(self.pause * _FORGET, min(waited, self.limit))
        self.seen = now

    def done(self, step: int) -> bool:
        """Return True if the worker has computed `step` and sent all of its results."""
        return self.phase == "idle" and self.step == step

    @property
    def limit(self) -> float:
        """Seconds of silence after which a worker that is needed counts as lost."""
        again = _TCP_VARIANCE_S + min(self.link.seconds, _FARTHEST_S)
        return max(SILENCE_S, _STUTTER * self.pause, _TCP_TRIES * again if self.link.far else 0)

    def silent(self, now: float) -> bool:
        """Return True if the worker has been silent for too long since it was needed."""
        return now - max(self.seen, self.asked) > self.limit

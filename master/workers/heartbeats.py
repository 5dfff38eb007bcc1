"""What a worker's heartbeats say, and when their absence means that it is lost.

While nothing is asked of a worker its silence means nothing: it is asked again when it is needed. All times are
`tpi.system.clocks.since_boot` seconds.
"""

import secrets
from dataclasses import dataclass, field

from tpi.net.fields import WindowState
from tpi.system.clocks import PAUSE_S

SILENCE_S = 2.5  # without a heartbeat (one is due every 0.25 s); longer on links that are far, or were seen to stutter
_STUTTER = 3  # times the longest recent pause between heartbeats
_FORGET = 0.98  # per heartbeat
# TCP sends what was lost again after a round trip and this, and then after twice, four and eight times as long (RFC
# 6298, 2 and 5.5; Linux: TCP_RTO_MIN)
_TCP_VARIANCE_S, _TCP_TRIES = 0.2, 1 + 2 + 4 + 8
_FAR_S = 0.05  # the round trip from which a link may lose: within a house none is as far, and WiFi sends again
_FARTHEST_S = 1.0  # the longest round trip that is believed: a worker may answer late for other reasons
_POLL_S = 0.5  # looked at less often than this, pauses say nothing about the link
_RETRY_S = 120.0  # the longest pause between two attempts of TCP to deliver the same (Linux: TCP_RTO_MAX)
_EXCHANGES, _APART_S = 4, 0.25  # that tell how far a link is, and the time between two
_AGAIN_S = 5.0  # between two more of a link that seems far, and until an answer is not waited for any more


@dataclass
class RoundTrip:
    """How long a link takes there and back: the least of several exchanges.

    One by itself says little: a worker may answer late for other reasons, or this process look late. So answers are
    looked out for closely, and of a link that seems far more are asked for, as long as it does.
    """

    seconds: float = 0.0  # 0: not known yet
    _number: int = 0  # that the answer will carry; 0: none is due
    _sent: float = 0.0
    _next: float = 0.0
    _begun: int = 0

    @property
    def far(self) -> bool:
        """Whether the link may lose what has to be sent again."""
        return self.seconds >= _FAR_S

    def due(self, now: float) -> bool:
        """Whether it is time for an exchange."""
        free = not self._number or now - self._sent > _AGAIN_S
        return now >= self._next and free and (self._begun < _EXCHANGES or self.far)

    def begin(self, now: float) -> int:
        """An exchange begins; the number that is to be sent, and to come back."""
        self._number, self._sent = 1 + secrets.randbits(63), now
        self._begun += 1
        self._next = now + (_APART_S if self._begun < _EXCHANGES else _AGAIN_S)
        return self._number

    def awaited(self, now: float) -> bool:
        """Whether an answer may come any moment: who looks late for it, measures that."""
        return bool(self._number) and now - self._sent < _FARTHEST_S

    def answered(self, number: int, now: float) -> None:
        """A number has come back; others than the last that was sent count for nothing."""
        if number and number == self._number:
            self._number = 0
            self.took(now - self._sent)

    def took(self, seconds: float) -> None:
        """So long an exchange took."""
        self.seconds = min(self.seconds or seconds, seconds)


@dataclass
class HeartbeatState:
    """What the heartbeats say."""

    progress: int = -1
    phase: str = "idle"
    step: int = 0  # that runs, or ran last
    window: WindowState = field(default_factory=WindowState)
    missed: int = -1  # the rank whose message is late in a sum, though this worker waits for nothing else
    advanced: float = 0.0  # when `progress` last grew
    seen: float = 0.0  # when anything was last heard
    asked: float = 0.0  # since when an answer is due
    looked: float = 0.0
    pause: float = 0.0  # the longest recent one, decaying
    link: RoundTrip = field(default_factory=RoundTrip)  # a far one has time before it was seen to stutter
    _closely: bool = False  # whether the last two looks followed each other closely

    def look(self, now: float) -> None:
        """Somebody is about to take in what has arrived."""
        gap = now - self.looked
        self._closely = gap < _POLL_S
        if self.looked and gap > PAUSE_S:  # this process stood still, which is not the worker's fault
            # what it sent meanwhile may come as late again: TCP doubles the time between its attempts
            self.asked = now + min(gap, _RETRY_S)
            self.advanced += gap
        self.looked = now

    def ask(self, now: float) -> None:
        """From now on the worker is needed."""
        self.asked = max(self.asked, now)

    def hear(self, now: float) -> None:
        """Something arrived."""
        if self.seen and self._closely:
            waited = now - max(self.seen, self.asked)
            self.pause = max(self.pause * _FORGET, min(waited, self.limit))
        self.seen = now

    def done(self, step: int) -> bool:
        """Whether the worker has computed that step, and sent all of it."""
        return self.phase == "idle" and self.step == step

    @property
    def limit(self) -> float:
        """Seconds of silence after which a worker that is needed is lost."""
        again = _TCP_VARIANCE_S + min(self.link.seconds, _FARTHEST_S)
        return max(SILENCE_S, _STUTTER * self.pause, _TCP_TRIES * again if self.link.far else 0)

    def silent(self, now: float) -> bool:
        """Whether it has been quiet for too long since it was needed."""
        return now - max(self.seen, self.asked) > self.limit

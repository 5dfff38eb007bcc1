"""`python -m tests.support.processes.bystander URL ADDRESS PID`: a client that streams short answers, one by one.

It connects from ADDRESS, which differs from the attacker's address, to the server with process id PID. It prints
`streams` after its first answer and goes on until its stdin ends. Then it prints its observations as JSON: the longest
gap between two events of a stream and the longest wait for a first token, in seconds, the number of streams, and the
errors. Gaps and waits leave out the time in which the server's event loop could run and got no processor.
"""

import json
import sys
from http.client import HTTPConnection
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from urllib.parse import urlsplit

BODY = {
    "messages": [{"role": "user", "content": "Tell me of a quiet evening."}], "stream": True, "max_tokens": 40,
    "ignore_eos": True, "temperature": 0,
}  # fmt: skip


class Bystander:
    """A client that streams answers and records gaps, waits and errors."""

    def __init__(self, url: str, address: str, server: int) -> None:
        self._at, self._address = urlsplit(url), address
        self._schedule = Path(f"/proc/{server}/schedstat")  # of the main thread, which runs the event loop
        self.gap = self.wait = 0.0
        self.streams = 0
        self.wrong: list[str] = []

    def stream(self) -> None:
        """Stream one answer; every second time over a new connection."""
        begun = last = self._clock()
        connection = HTTPConnection(str(self._at.hostname), self._at.port, 120, (self._address, 0))
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(BODY), {"Content-Type": "application/json"})
            answer, events = connection.getresponse(), 0
            while line := answer.readline():
                if not line.startswith(b"data: "):
                    continue
                now, events = self._clock(), events + 1
                if events == 2:  # the first says the role, before anything is computed
                    self.wait = max(self.wait, now - begun)
                elif events > 2:
                    self.gap = max(self.gap, now - last)
                last, ended = now, line
            if answer.status != 200 or b"[DONE]" not in ended or b'"error"' in ended:
                self.wrong.append(f"{answer.status} {ended[:200]!r}")
        except (OSError, ValueError, UnboundLocalError) as error:
            self.wrong.append(repr(error))
        finally:
            connection.close()
        self.streams += 1

    def _clock(self) -> float:
        """Return seconds of a clock that stands still while the server's event loop waits for a processor.

        Other programs that keep the machine busy thus lengthen no gap. Without Linux's figures, the clock never stops.
        """
        delay = self._schedule.read_text().split()[1] if self._schedule.exists() else "0"  # nanoseconds
        return perf_counter() - int(delay) / 1e9


def main() -> None:
    over, one = Event(), Bystander(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    one.stream()
    one.gap = one.wait = 0.0  # the first loads what later ones need
    say("streams")
    Thread(target=wait_for_end, args=(over,), daemon=True).start()
    while not over.is_set():
        one.stream()
    say(json.dumps({"gap": one.gap, "wait": one.wait, "streams": one.streams, "wrong": one.wrong}))


def wait_for_end(over: Event) -> None:
    sys.stdin.read()
    over.set()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

"""A master that finds its workers. In a network without multicast, a file replaces their announcements.

`python -m tests.support.processes.finding_master MODEL FILE` reads a line `NAME KEY HOST` for each machine from FILE;
with `-` it listens to announcements. For every line on stdin it answers a short request, and prints the nodes, the
tokens, and the bytes of weights sent, as JSON. It searches more often than a usual master, except with `--own-pace`.
"""

import json
import sys
from pathlib import Path
from unittest.mock import patch

from master.joining import discoverythread, probe
from master.joining.discovery import find_workers
from master.options import RunOptions
from master.session import Session
from tests.support.house import timed_answer
from tpi.config import default_cache
from tpi.keys.announcement import Announcement
from tpi.keys.policy import KeyPolicy

_PORT = 9990
_PROMPT, _LENGTH = [5, 6, 7, 8], 2


def _announced(file: Path) -> list[Announcement]:
    lines = [line.split() for line in file.read_text().splitlines()]
    return [Announcement(name, bytes.fromhex(key), _PORT, (host,)) for name, key, host in lines]


def main(model: str, file: str, *flags: str) -> None:
    def find(policy: KeyPolicy) -> list[Announcement]:
        return find_workers(policy) if file == "-" else _announced(Path(file))

    if "--own-pace" not in flags:
        discoverythread._EVERY_S = discoverythread._SELDOM_S = 0.3
        probe._EVERY_S = 0.5
    options = RunOptions(model, discover=True, context=64, cache=default_cache())
    with (
        patch("master.session.find_workers", find),
        patch("master.joining.discovery.find_workers", find),
        Session(options) as session,
    ):
        for _ in sys.stdin:
            tokens = timed_answer(session, _PROMPT, _LENGTH).tokens
            sent = session.figures.fields()["weights_sent_bytes"]
            sys.stdout.write(json.dumps((session.names, tokens, sent)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

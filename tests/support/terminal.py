"""A command at a pseudo-terminal: tests send keys and read the screen's text, without fixed waits."""

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tests.support.forking import OWN_TERMINAL

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[()][A-Z0-9]|[=>78])")
ENTER, ALT_ENTER, CTRL_C, CTRL_D, UP = "\r", "\x1b\r", "\x03", "\x04", "\x1b[A"


class Terminal:
    """One process at its terminal. `screen` is all text shown so far, without escape sequences."""

    def __init__(self, process: "subprocess.Popen[bytes]", fd: int) -> None:
        self.process = process
        self.raw = b""
        self._fd = fd
        self._seen = 0

    @property
    def screen(self) -> str:
        return _ESCAPES.sub("", self.raw.decode(errors="replace")).replace("\r", "")

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def expect(self, text: str, seconds: float = 90) -> str:
        """Read until `text` is shown; return the text shown since the last call, up to the end of `text`."""
        ends = time.monotonic() + seconds
        while (found := self.screen.find(text, self._seen)) < 0:
            assert self._read(ends), f"no {text!r} after:\n{self.screen}"
        shown, self._seen = self.screen[self._seen : found], found + len(text)
        return shown

    def leave(self, seconds: float = 60) -> int:
        """Read to the end of the output, and return the exit code."""
        ends = time.monotonic() + seconds
        while self._read(ends):
            pass
        return self.process.wait(max(1.0, ends - time.monotonic()))

    def attributes(self) -> list[Any]:
        """Return the terminal's settings, as `termios.tcgetattr` gives them."""
        return termios.tcgetattr(self._fd)[:4]

    def _read(self, ends: float) -> bool:
        """Append the next output to `screen`; return False at the end of the output or at the time `ends`."""
        ready, _, _ = select.select([self._fd], [], [], max(0.0, ends - time.monotonic()))
        try:
            data = os.read(self._fd, 4096) if ready else b""
        except OSError:  # Linux's end of file: the other side is closed
            data = b""
        self.raw += data
        return bool(data)


@contextmanager
def terminal(
    command: Sequence[str], environment: Mapping[str, str], size: tuple[int, int] = (24, 200)
) -> Iterator[Terminal]:
    """Run `command` with `environment` at a terminal of `size` (lines, columns) during the block."""
    fd, other = os.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", OWN_TERMINAL, *command],
        stdin=other, stdout=other, stderr=other, start_new_session=True, env=dict(environment),
    )  # fmt: skip
    os.close(other)
    try:
        yield Terminal(process, fd)
    finally:
        process.kill()
        process.wait()
        os.close(fd)

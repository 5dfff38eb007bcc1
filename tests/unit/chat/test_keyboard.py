"""Keys pressed while nothing reads them: not shown, kept for later, and not taken by background processes."""

import os
import sys
from pathlib import Path

from tests.support.terminal import ENTER, terminal

KEEP = """
import os, sys, termios
from tpi.system.keyboard import echo_disabled
if sys.argv[1] == "background":
    if child := os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, os.WUNTRACED)[1]))
    os.setpgid(0, 0)  # setting a terminal from here would stop this process
before = termios.tcgetattr(0)
with echo_disabled(lines=True):
    print("within", termios.tcgetattr(0) == before, flush=True)
    while sys.argv[1] == "kept" and not os.path.exists(sys.argv[2]):
        pass
print("after", termios.tcgetattr(0) == before, flush=True)
if sys.argv[1] == "kept":
    print("read", sys.stdin.readline(), flush=True)
"""


def test_what_is_typed_is_read_afterwards_and_not_shown(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with terminal([sys.executable, "-c", KEEP, "kept", str(go)], dict(os.environ)) as screen:
        screen.expect("within False")
        screen.type("hello" + ENTER)
        go.touch()
        assert "hello" not in screen.expect("after True")
        screen.expect("read hello")
        assert screen.leave() == 0


def test_a_process_in_the_background_leaves_the_terminal_alone() -> None:
    with terminal([sys.executable, "-c", KEEP, "background", ""], dict(os.environ)) as screen:
        screen.expect("within True")
        screen.expect("after True")
        assert screen.leave() == 0

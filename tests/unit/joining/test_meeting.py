"""The errors for workers that do not answer when a run begins."""

from types import SimpleNamespace
from typing import Any

import pytest

from master.workers.meeting import Meeting


@pytest.mark.parametrize(
    ("connected", "words"),
    [
        (False, ("nothing answers at 192.168.1.7:9990", "the address is right", "the machine is on", "firewall")),
        (True, ("answers at 192.168.1.7:9990, but not as a tpi worker", "prints first", "not its collective")),
    ],
    ids=["silent machine", "another port"],
)
def test_an_error_for_silence_has_the_way_out(connected: bool, words: tuple[str, ...]) -> None:
    """A machine that is on and has no worker refuses the connection: to start a worker is no way out of silence."""
    there: Any = SimpleNamespace(hello=object())
    silent: Any = SimpleNamespace(hello=None, connected=connected, address="192.168.1.7:9990")
    error = Meeting([there, silent]).no_answer()
    assert error.node == silent.address
    assert all(each in str(error) for each in words)
    assert "tpi worker --listen" not in str(error)

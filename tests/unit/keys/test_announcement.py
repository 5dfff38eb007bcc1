"""A worker's announcement fits into the fields of mDNS, whatever its name."""

import pytest
from click.testing import CliRunner
from zeroconf import ServiceInfo

from tpi.keys.announcement import SERVICE, Announcement, read_announcement
from worker.commands import worker

KEY = bytes(range(32))


@pytest.mark.parametrize("letter", ["a", "\u00e4", "\u65e5", "\U0001f600"])
def test_any_name_can_be_announced(letter: str) -> None:
    """A field of a text record holds 255 bytes, including its key."""
    said = Announcement(letter * 64, KEY, 9990, ("192.0.2.7",))
    sent = ServiceInfo(SERVICE, said.instance, port=9990, addresses=said.packed_hosts, properties=said.properties)
    read = read_announcement(sent.properties, 9990, ["192.0.2.7"])
    assert read is not None
    assert set(read.name) == {letter}
    assert len(read.name) >= 62
    assert read.key == KEY


def test_the_worker_says_that_without_keys_it_announces_nothing() -> None:
    assert "Turns off --announce too" in " ".join(CliRunner().invoke(worker, ["--help"]).output.split())

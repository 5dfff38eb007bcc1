"""Trusted keys: valid until revoked, seen at once by every process; none is valid if the file is damaged."""

import stat
from pathlib import Path
from threading import Thread

import pytest

from tests.support.cluster.key_helpers import pair_folders
from tpi.errors import UsageError
from tpi.keys.identity import load_identity
from tpi.keys.policy import KeyPolicy, leaves_machine
from tpi.keys.ring import FILE, KeyRing, PairedKey
from tpi.keys.text import key_text


def key(number: int) -> bytes:
    return bytes([number]) * 32


def test_paired_until_revoked_for_every_process_that_looks(tmp_path: Path) -> None:
    ring, other = KeyRing(tmp_path), KeyRing(tmp_path)
    assert other.read().paired == ()
    ring.pair(PairedKey("laptop", key(1), "192.0.2.7"))
    ring.pair(PairedKey("laptop", key(2)))
    assert [(one.name, one.key, one.host) for one in other.read().paired] == [
        ("laptop", key(1), "192.0.2.7"),
        ("laptop 2", key(2), ""),
    ]
    assert ring.revoke("laptop").key == key(1)
    assert [one.name for one in other.read().paired] == ["laptop 2"]
    assert other.read().revoked == {key(1)}
    ring.pair(PairedKey("again", key(1)))
    assert other.read().revoked == frozenset()
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_an_ambiguous_key_is_not_revoked(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path)
    one, two = bytes(31) + b"\1", bytes(31) + b"\2"
    ring.pair(PairedKey("a", one))
    ring.pair(PairedKey("b", two))
    for which, problem in (("c", "not a paired machine"), ("aaaa", "matches several"), ("", "not a paired machine")):
        with pytest.raises(UsageError, match=problem):
            ring.revoke(which)
    assert ring.revoke(key_text(two)[:63]).name == "b"


def test_concurrent_pairings_lose_no_key(tmp_path: Path) -> None:
    threads = [Thread(target=KeyRing(tmp_path).pair, args=(PairedKey("one", key(n)),)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    paired = KeyRing(tmp_path).read().paired
    assert {one.key for one in paired} == {key(n) for n in range(12)}
    assert len({one.name for one in paired}) == 12


def test_a_damaged_file_admits_no_key(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    pair_folders(here, there)
    theirs, policy = load_identity(there).public, KeyPolicy(here)
    assert policy.admits(theirs)
    (here / FILE).write_text("{")
    assert not policy.admits(theirs)
    with pytest.raises(UsageError, match="is damaged"):
        KeyRing(here).read()


def test_an_unreadable_file_is_explained_and_admits_no_key(tmp_path: Path) -> None:
    """A file in place of the folder, a lost network drive, or no permission."""
    folder = tmp_path / "keys"
    folder.write_text("")
    with pytest.raises(UsageError, match=r"keys\.json cannot be read: Not a directory; .*TPI_CONFIG"):
        KeyRing(folder).read()
    assert KeyPolicy(folder).keys.paired == ()
    with pytest.raises(UsageError, match="TPI_CONFIG"):
        KeyRing(folder).pair(PairedKey("laptop", key(1)))


def test_a_guest_may_only_sum_until_its_key_is_revoked(tmp_path: Path) -> None:
    policy = KeyPolicy(tmp_path)
    policy.guests = frozenset({key(1)})
    assert policy.admits(key(1), sums=True)
    assert not policy.admits(key(1))
    KeyRing(tmp_path).pair(PairedKey("guest", key(1)))
    KeyRing(tmp_path).revoke("guest")
    assert not policy.admits(key(1), sums=True)
    assert policy.any_refused([key(1)])
    assert not policy.any_refused([b"", policy.identity.public])


@pytest.mark.parametrize(
    ("host", "leaves"),
    [("127.0.0.1", False), ("127.8.9.1", False), ("::1", False), ("[::1]", False), ("localhost", False),
     ("0.0.0.0", True), ("::", True), ("192.168.1.7", True), ("fe80::1%eth0", True), ("laptop", True)],
)  # fmt: skip
def test_what_leaves_the_machine(host: str, leaves: bool) -> None:
    assert leaves_machine(host) == leaves
    assert not KeyPolicy(locked=False).guards(host)


def test_keys_of_a_host_begin_with_the_last_one_met(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path)
    for number, host in enumerate(("192.0.2.1", "192.0.2.2", "192.0.2.3")):
        ring.pair(PairedKey(host, key(number), host))
    policy = KeyPolicy(tmp_path)
    assert policy.trusted("192.0.2.2")[0] == key(1)
    assert policy.trusted("192.0.2.9")[-1] == policy.identity.public
    assert len(policy.trusted("192.0.2.9")) == 4

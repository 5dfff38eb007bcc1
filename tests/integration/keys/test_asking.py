"""Inquiries to workers, the findings of tpi doctor, and announcements."""

import socket
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from allreduce import cache
from master.joining import checks, commands, discovery
from master.joining.checks import Observation, check_machine, check_workers
from master.joining.discovery import find_workers, willing_at_home, workers_at_home
from master.joining.memory import house_memory
from master.options import RunOptions
from master.planning.home import asked
from master.planning.home import flags as home_flags
from master.planning.home.flags import home_of
from master.planning.node import NodeFlags
from master.session import Session
from master.workers.asking import _BURST, WorkerInquiry, ask
from master.workers.cluster import Cluster
from master.workers.survey import WorkerLinks
from scheduler.model.machine import LAPTOP
from tests.support.cluster.cluster_helpers import fake_workers
from tests.support.cluster.key_helpers import locked, pair_folders, trust
from tests.support.commands import tpi
from tests.support.house import until
from tests.support.processes.hostile_worker import Hostile, hostile
from tpi import __version__
from tpi.errors import ModelError, UsageError
from tpi.keys.announcement import Announcement
from tpi.keys.identity import load_identity
from tpi.keys.policy import KeyPolicy
from tpi.keys.ring import KeyRing, PairedKey
from tpi.net import codec
from tpi.net.fields import Card
from tpi.net.questions import MOST_ECHOED, Condition, Echo, Inquiry
from tpi.net.sockets import Net
from tpi.topology.links import Link
from worker.service.announce import Announcer

NOBODY = "127.0.0.1:9"


def test_the_memory_of_the_house_is_that_of_free_workers(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    pair_folders(here, there)
    with fake_workers([tmp_path / "a", tmp_path / "b"], "--keys", str(here)) as (_, (first, second)):
        alone = house_memory(1 << 30, [NOBODY], locked(there))
        assert (alone.nbytes, alone.machines) == (1 << 30, 1)
        both = house_memory(1 << 30, [first, second], locked(there))
        with Cluster.connect([first], Net(policy=locked(tmp_path / "there"))):
            free = house_memory(1 << 30, [first, second], locked(there))
    assert (both.machines, free.machines) == (3, 2)
    assert both.nbytes > free.nbytes > 1 << 30


def test_workers_name_their_master_without_being_used(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    pair_folders(here, there)
    with (
        fake_workers([tmp_path / "a", tmp_path / "b"], "--keys", str(here)) as (_, (first, second)),
        closing(Net(policy=locked(there))) as net,
    ):
        with Cluster.connect([first], Net(policy=locked(there))) as cluster:
            used, free = ask(net, [first, second], seconds=20)
            (gone,) = ask(net, [NOBODY], seconds=0.5)
            assert used.condition is not None
            assert free.condition is not None
            assert used.condition.used_by == cluster.name
            assert (free.condition.name, free.condition.used_by, free.condition.version) == ("b", "", __version__)
            assert used.key == load_identity(here).public
            assert gone.condition is None
            assert "connection refused" in gone.problem
            cluster.poll()
        until(lambda: free_again(net, first))  # it hears of the end a moment after the master is gone


def free_again(net: Net, address: str) -> bool:
    (later,) = ask(net, [address])
    assert later.condition is not None
    return later.condition.used_by == ""


def test_doctor_tries_ports_from_both_sides(tmp_path: Path) -> None:
    links = WorkerLinks(tmp_path / "links.json")
    with fake_workers([tmp_path / "a", tmp_path / "b"]) as (_, addresses), closing(Net()) as net:
        cache.save(tmp_path / "links.json", [one.end for one in ask(net, addresses)], {(0, 1): Link(0.001, 1e7)}, {})
        found = dict(check_workers(net, [*addresses, NOBODY], links))
        for address in addresses:
            assert [one.subject for one in found[address] if one.advice and one.subject != "disk"] == []
            reached = [one.found for one in found[address] if "can be reached from this machine" in one.found]
            assert len(reached) == 2
        assert found[addresses[0]][-1] == Observation("link", "1 ms and 80 Mbit/s to b, as last measured")
        assert [(one.subject, bool(one.advice)) for one in found[NOBODY]] == [("answer", True)]
        with socket.create_server(("127.0.0.2", 0)) as another:
            elsewhere = f"127.0.0.2:{another.getsockname()[1]}"
            blocked = {addresses[0]: (NOBODY, addresses[1], "nonsense", elsewhere)}
            (one,) = ask(net, [addresses[0]], blocked)
            another.setblocking(False)
            with pytest.raises(BlockingIOError):
                another.accept()
        assert one.condition is not None
        assert one.condition.unreached == (NOBODY,)
        assert one.condition.untried == ("nonsense", elsewhere)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "0.0.0.0", "::1"])
def test_a_worker_that_listens_at_any_address_takes_its_port(tmp_path: Path, host: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        found = [
            one.found for one in check_machine(KeyPolicy(tmp_path / "keys"), tmp_path, port) if one.subject == "ports"
        ]
        assert any(f"{port} is in use;" in one for one in found)
    found = [one.found for one in check_machine(KeyPolicy(tmp_path / "keys"), tmp_path, port) if one.subject == "ports"]
    assert not any(f"{port} is in use;" in one for one in found)


def test_a_clock_that_nothing_minds_is_no_trouble() -> None:
    """The clock's error is shown, but the exit code counts only what prevents a run."""

    def answer(worker: Hostile, message: object) -> list[object]:
        if not isinstance(message, Inquiry):
            return []
        ports, profile = (worker.port, worker.port), worker.hello(0).profile
        return [Condition(message.number, __version__, "late", "", 0.0, time.time() - 3600, *ports, profile, ())]

    with hostile(answer) as worker, closing(Net()) as net:
        ((_, found),) = check_workers(net, [worker.address], WorkerLinks(None))
    (clock,) = (one for one in found if one.subject == "clock")
    assert clock.advice == ""
    assert "s apart" in clock.found
    assert "other programs do: set them" in clock.found


def test_what_a_worker_says_reaches_no_terminal_as_a_command(tmp_path: Path) -> None:
    """Neither the worker's name, nor its card's, nor ports that it was not asked to try."""
    clear = "\x1b[2J"
    card = Card(f"card {clear}", 1 << 30, "auto", "auto", "auto", 0)

    def answer(worker: Hostile, message: object) -> list[object]:
        if not isinstance(message, Inquiry):
            return []
        profile = replace(worker.hello(0).profile, host=clear, system=clear, card=card)
        ports, unreached = (worker.port, worker.port), (clear, "192.0.2.1:9990", *message.reach)
        return [Condition(message.number, clear, clear, clear, 0.0, 0.0, *ports, profile, unreached)]

    with hostile(answer) as one, hostile(answer) as other, closing(Net()) as net:
        addresses = [one.address, other.address]
        for address, found in check_workers(net, addresses, WorkerLinks(None)):
            assert all(text.isprintable() for each in found for text in (each.subject, each.found, each.advice))
            assert next(each.found for each in found if each.subject == "devices").endswith("card ?[2J")
            (unreached,) = (each.found for each in found if "from that machine" in each.found)
            assert next(each for each in addresses if each != address) in unreached


def test_doctor_looks_at_this_machine(tmp_path: Path) -> None:
    found = list(check_machine(KeyPolicy(tmp_path / "keys"), tmp_path / "not" / "there", 1))
    assert [one.subject for one in found[:3]] == ["key", "disk", "memory"]
    assert "no machine yet" in found[0].found


def test_a_wrong_model_is_refused_before_workers_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("master.session.with_found", lambda *_: pytest.fail("workers were searched"))
    with (
        pytest.raises(ModelError, match="there is no model 'no-such-model'"),
        Session(RunOptions("no-such-model", cache=tmp_path)),
    ):
        pass


def test_ps_and_doctor_as_commands(tmp_path: Path) -> None:
    with fake_workers([tmp_path / "a"]) as (_, (address,)):
        listed = tpi("ps", "--workers", address, cache=tmp_path)
        assert listed.returncode == 0
        assert f"a  {address}  free" in listed.stdout
        looked = tpi("doctor", "--workers", f"{address},{NOBODY}", cache=tmp_path)
        assert looked.returncode == 1
        assert f"! answer   no worker answers at {NOBODY}" in looked.stdout
    nobody = tpi("ps", cache=tmp_path, TPI_CONFIG=str(tmp_path / "keys"))
    assert "no workers" in nobody.stderr


def test_paired_workers_are_found_by_announcement_and_others_not(tmp_path: Path) -> None:
    here, there, stranger = tmp_path / "here", tmp_path / "there", tmp_path / "stranger"
    pair_folders(here, there)
    ours = Announcer("laptop", load_identity(here).public, "127.0.0.1", 9990)
    theirs = Announcer("stranger", load_identity(stranger).public, "127.0.0.1", 9991)
    try:
        found = find_workers(KeyPolicy(there, lambda host: True), seconds=20, interfaces=["127.0.0.1"])
        unproved = find_workers(KeyPolicy(there), seconds=20, interfaces=["127.0.0.1"])
    finally:
        ours.close()
        theirs.close()
    assert unproved == []  # on this machine no key is proved
    assert [(one.name, one.key, one.addresses) for one in found] == [
        ("laptop", load_identity(here).public, ["127.0.0.1:9990"])
    ]


def test_a_worker_that_revoked_this_machine_blocks_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, good, bad = tmp_path / "here", tmp_path / "good", tmp_path / "bad"
    pair_folders(here, good)
    trust(here, bad)
    said: list[str] = []
    with (
        fake_workers([tmp_path / "a"], "--keys", str(good)) as (_, (willing,)),
        fake_workers([tmp_path / "b"], "--keys", str(bad)) as (_, (unwilling,)),
    ):
        found = [
            Announcement(folder.name, load_identity(folder).public, int(address.rpartition(":")[2]), ("127.0.0.1",))
            for folder, address in ((good, willing), (bad, unwilling))
        ]
        monkeypatch.setattr("master.joining.discovery.find_workers", lambda policy: found)
        assert willing_at_home(locked(here), said.append) == [willing]
        assert said[0].startswith("going on without bad: ")
        # libzmq reports a connection that is refused as merely closed if the peer's reason is lost
        assert "does not accept this machine's key" in said[0] or "has none of the keys" in said[0]
        assert said[1:] == [f"using good ({willing}); --workers none uses no other machine"]
        assert workers_at_home(locked(here), said.append) == [willing, unwilling]
        del found[0], said[:]
        assert willing_at_home(locked(here), said.append) == []
        assert "this machine computes alone" in said[1]


def test_an_unpaired_machine_asks_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeroconf", None)  # importing it would fail
    said: list[str] = []
    assert workers_at_home(KeyPolicy(tmp_path), said.append) == []
    assert said == []


def test_a_machine_behind_a_firewall_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is announced but cannot be reached. Doctor reports it, and a run says so."""
    here, there = tmp_path / "here", tmp_path / "laptop"
    pair_folders(here, there)
    found = [Announcement("laptop", load_identity(there).public, 9, ("127.0.0.1",))]
    monkeypatch.setattr("master.joining.discovery.find_workers", lambda policy: found)
    said: list[str] = []
    assert workers_at_home(locked(here), said.append) == [NOBODY]
    assert said == []
    assert willing_at_home(locked(here), said.append) == []
    assert said == [
        f"going on without laptop: it announces itself at {NOBODY}, where no worker answers; its firewall has to let "
        "ports 9 to 11 through",
        "this machine computes alone",
    ]
    with closing(Net(policy=locked(here))) as net:
        ((address, (observed,)),) = check_workers(net, [NOBODY], WorkerLinks(None))
    assert (address, observed.subject) == (NOBODY, "answer")
    assert observed.found.endswith("(connection refused)")
    assert observed.advice.startswith("start a worker on that machine")
    assert observed.advice.endswith("; its firewall has to let ports 9 to 11 through")


def test_a_worker_of_another_protocol_is_told_to_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = codec.protocol()
    with fake_workers([tmp_path / "a"]) as (_, (address,)), closing(Net()) as net:
        monkeypatch.setattr(codec, "protocol", lambda: own ^ 1)
        ((_, (observed,)),) = check_workers(net, [address], WorkerLinks(None))
    assert f"(protocol {own:x}), this machine runs tpi" in observed.found
    assert observed.advice == "install the same version on both"


def test_a_worker_announced_wrongly_is_sought_where_paired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "laptop"
    key = load_identity(there).public
    KeyRing(here).pair(PairedKey("laptop", key, host="127.0.0.1"))
    found = [Announcement("laptop", key, 9, ("127.0.0.1",))]
    monkeypatch.setattr("master.joining.discovery.find_workers", lambda policy: found)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr("master.joining.discovery._PORT", port)
        assert workers_at_home(locked(here), lambda text: None) == [f"127.0.0.1:{port}"]


@pytest.mark.parametrize("no_keys", [False, True])
def test_ps_doctor_and_plan_ask_with_keys_or_without(no_keys: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    policies: list[bool] = []

    def nobody(net: Net, *_: object, **more: object) -> list[WorkerInquiry]:
        policies.append(net.policy.locked)
        return []

    for room in (commands, checks, asked):
        monkeypatch.setattr(room, "ask", nobody)
    flags = ["--workers", "192.0.2.1:9990", *(["--no-keys"] if no_keys else [])]
    for command in (commands.ps, commands.doctor):
        CliRunner().invoke(command, flags, catch_exceptions=False)
    monkeypatch.setattr(home_flags, "planned_node", lambda *_: SimpleNamespace(machine=LAPTOP))
    assert home_of(planned(workers=("192.0.2.1:9990",), no_keys=no_keys), NodeFlags(), Path(), []) is not None
    assert len(policies) >= 3
    assert set(policies) == {not no_keys}


def planned(**given: object) -> dict[str, Any]:
    """Return flags of tpi plan."""
    none = dict.fromkeys(("devices", "topology", "workers", "link", "machine", "device", "gpu_memory"))
    return (
        none
        | {"batch": 1, "weights": "auto", "kv": "auto", "pipeline": "auto", "no_keys": False, "remeasure": False}
        | given
    )


def test_no_keys_of_a_plan_goes_with_workers() -> None:
    with pytest.raises(UsageError, match="--no-keys says how --workers are asked"):
        home_of(planned(no_keys=True, devices="2x8GiB"), NodeFlags(), Path(), [])


def test_without_keys_no_worker_is_sought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPI_CONFIG", str(tmp_path))
    monkeypatch.setattr(discovery, "workers_at_home", None)  # calling it would fail
    assert "no workers" in CliRunner().invoke(commands.ps, ["--no-keys"], catch_exceptions=False).output


def test_a_slow_link_is_measured_by_the_part_that_came(tmp_path: Path) -> None:
    """A quarter of the echoes arrives in time; an estimate from these is better than none."""
    echoed = list[Echo]()

    def echo(worker: Hostile, message: object) -> list[object]:
        if isinstance(message, Inquiry):
            profile = worker.hello(0).profile
            return [Condition(message.number, __version__, "slow", "", 0.0, 0.0, worker.port, worker.port, profile, ())]
        if isinstance(message, Echo) and message.data:
            echoed.append(message)
        return [message] if isinstance(message, Echo) and (not message.data or len(echoed) % 4 == 0) else []

    with hostile(echo) as worker, closing(Net()) as net:
        (asked,) = ask(net, [worker.address], links=True, seconds=1.0)
        assert asked.link
        assert len(echoed) == _BURST  # it is not asked for more, once the time is over
        assert asked.link.bytes_per_s < 2 * _BURST * MOST_ECHOED / 3.9  # a second for a quarter, both ways
        (asked,) = ask(net, [worker.address], links=True, wanted=lambda: False)
        assert asked.link is None
        assert asked.condition is None


def test_a_worker_that_echoes_too_much_is_measured(tmp_path: Path) -> None:
    def echo_twice(worker: Hostile, message: object) -> list[object]:
        if isinstance(message, Inquiry):
            profile = worker.hello(0).profile
            return [Condition(message.number, __version__, "loud", "", 0.0, 0.0, worker.port, worker.port, profile, ())]
        return [message, message] if isinstance(message, Echo) else []

    with hostile(echo_twice) as worker, closing(Net()) as net:
        (asked,) = ask(net, [worker.address], links=True, seconds=10_000.0)  # none of it is waited for
        assert asked.link

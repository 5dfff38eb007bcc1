"""Topology files: units, the strict schema and its error messages, and the files that ship with TPI."""

import pytest

from tpi.errors import UsageError
from tpi.topology.schema import load_topology, parse_topology, shipped
from tpi.topology.topology import Host, HostLink, Router, Topology
from tpi.topology.units import format_rate, parse_disk, parse_percent, parse_rate, parse_time

GOOD = """
name: home
about: an example of everything
defaults:
  device: {cpu: 2}
  link: {bandwidth: 100 Mbit, latency: 2 ms}
devices:
  desk:
  shelf: {cpu: 0.5, memory: 2GiB, disk: 80 MB/s}
routers:
  wifi: {shared: 200 Mbit}
links:
  - between: [desk, wifi]
  - {between: [wifi, shelf], bandwidth: unlimited, jitter: 500 us, loss: 0.5%, queue: 50 ms}
"""


def test_every_field_is_read_and_defaults_apply() -> None:
    home = parse_topology(GOOD, "home.yaml", "file")
    assert (home.name, home.about) == ("home", "an example of everything")
    assert home.devices == (Host("desk", 2.0), Host("shelf", 0.5, 2 << 30, 80e6))
    assert home.routers == (Router("wifi", 200e6),)
    assert home.links == (
        HostLink(("desk", "wifi"), 100e6, 2e-3),
        HostLink(("wifi", "shelf"), float("inf"), 2e-3, 500e-6, 0.005, 0.05),
    )
    assert Topology.from_dict(home.to_dict()) == home


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("devices: {a: }\ncolour: red", 2, "no field 'colour'"),
        ("devices:\n  a: {cpus: 3}", 2, "'a' has no field 'cpus'"),
        ("devices:\n  a:\n    memory: lots", 3, "'memory'"),
        ("devices:\n  a: {cpu: 0}", 2, "'cpu'"),
        ("devices:\n  a: {cpu: [1]}", 2, "'cpu' must be a single value"),
        ("devices:\n  a: {disk: 80 Mbit}", 2, "'disk'"),
        ("devices: [a]", 1, "'devices' must be a mapping"),
        ("devices:\n  a:\n  a:", 3, "twice"),
        ("devices:\n  a name: ", 2, "not a valid name"),
        ("devices: {a: , b: }\nlinks: {a: b}", 2, "'links' must be a list"),
        ("devices: {a: , b: }\nlinks:\n  - {bandwidth: 1 Gbit}", 3, "needs 'between'"),
        ("devices: {a: , b: }\nlinks:\n  - between: [a, z]", 3, "'z'"),
        ("devices: {a: , b: }\nlinks:\n  - between: [a, a]", 3, "itself"),
        ("devices: {a: , b: }\nlinks:\n  - between: [a, b]\n    latency: 3", 4, "'latency'"),
        ("devices: {a: , b: }\nlinks:\n  - between: [a, b]\n    bandwidth: 0 Mbit", 4, "carries nothing"),
        ("devices: {a: , b: }\nlinks:\n  - {between: [a, b], latency: 1 ms, jitter: 2 ms}", 3, "'jitter'"),
        ("devices: {a: , b: }\nlinks:\n  - {between: [a, b], loss: 101%}", 3, "'loss'"),
        ("devices: {a: }\nrouters:\n  r: {shared: fast}", 3, "'shared'"),
        ("devices: {a: [", 1, "not YAML"),
        ("links: []", 1, "needs 'devices'"),
    ],
)
def test_a_complaint_names_file_line_and_field(text: str, line: int, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_topology(text, "bad.yaml", "bad")
    assert str(caught.value).startswith(f"bad.yaml, line {line}: ")
    assert words in str(caught.value)


def test_devices_that_nothing_connects_are_an_error() -> None:
    with pytest.raises(UsageError, match="no path from a to b"):
        parse_topology("devices: {a: , b: }", "bad.yaml", "bad")
    with pytest.raises(UsageError, match="is empty"):
        parse_topology("", "bad.yaml", "bad")


def test_devices_do_not_forward() -> None:
    with pytest.raises(UsageError, match="no path from a to c"):
        Topology("chain", (Host("a"), Host("b"), Host("c")), (HostLink(("a", "b")), HostLink(("b", "c"))))


@pytest.mark.parametrize(
    ("name", "devices", "one_way_ms", "mbit"),
    [
        ("paper-8-devices", 8, 4, 300),
        ("paper-4-laptops", 4, 12, 320),
        ("lan-10ms-1gb", 4, 10, 1000),
        ("lan-10ms-100mb", 4, 10, 100),
        ("wan-100ms-100mb", 4, 100, 100),
        ("two-devices", 2, 1, 1000),
        ("home-wired", 4, 0.3, 1000),
        ("home-wifi", 4, 4, 150),
        ("home-pairs", 4, 0.3, 1000),
        ("home-far", 4, 0.3, 1000),
        ("home-uneven", 4, 1, 300),
        ("home-slow-disks", 4, 4, 150),
    ],
)
def test_shipped_topologies_are_what_their_names_say(name: str, devices: int, one_way_ms: float, mbit: float) -> None:
    topology = load_topology(name)
    first, second = topology.devices[0].name, topology.devices[1].name
    assert topology.name == name
    assert len(topology.devices) == devices
    assert topology.latency(first, second) == pytest.approx(one_way_ms / 1e3)
    assert topology.bandwidth(first, second) == mbit * 1e6
    assert topology.about


def test_shipped_homes_are_near_and_far_where_they_say() -> None:
    pairs, far = load_topology("home-pairs"), load_topology("home-far")
    assert pairs.latency("device3", "device4") == pairs.latency("device1", "device2") == pytest.approx(0.0003)
    assert pairs.latency("device2", "device3") == pytest.approx(0.007)
    assert pairs.bandwidth("device2", "device3") == 150e6  # a packet crosses the channel twice
    assert far.latency("device1", "far") == pytest.approx(0.03, rel=0.01)
    assert far.bandwidth("device1", "far") == 50e6


def test_the_table_above_has_all_that_ship() -> None:
    assert len(shipped()) == 12
    with pytest.raises(UsageError, match="paper-8-devices"):
        load_topology("no-such-topology")


def test_units() -> None:
    assert parse_rate("300 Mbit") == parse_rate("300Mbps") == parse_rate("0.3 Gbit/s") == 300e6
    assert (parse_disk("1.5 GB/s"), parse_time("250 us"), parse_time("0.1 s")) == (1.5e9, 250e-6, 0.1)
    assert parse_percent("2.5%") == 0.025
    assert [format_rate(bits) for bits in (1e9, 875.9e6, 64e3, float("inf"))] == [
        "1 Gbit",
        "875.9 Mbit",
        "64 kbit",
        "unlimited",
    ]
    for parse in (parse_rate, parse_disk, parse_time, parse_percent):
        with pytest.raises(ValueError, match="12 bananas"):
            parse("12 bananas")

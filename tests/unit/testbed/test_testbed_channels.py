"""The arithmetic of the user-space link, without a clock or a socket."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testbed.network.channels import Emulator
from tests.support.testbed_helpers import pair, wheel
from tpi.topology.schema import load_topology
from tpi.topology.topology import Host, HostLink, Router, Topology


def drain(emulator: Emulator) -> list[tuple[float, int, bytes]]:
    """Return all packets in transit, polling when the emulator asks for it."""
    arrived = []
    while emulator.next_event() != float("inf"):
        arrived += emulator.due(emulator.next_event())
    return arrived


def test_a_packet_takes_latency_and_its_own_length() -> None:
    emulator = Emulator(pair(8e6, 0.01))  # one byte per microsecond
    emulator.send(5.0, 0, 1, bytes(1000))
    ((time, device, packet),) = drain(emulator)
    assert (device, packet) == (1, bytes(1000))
    assert time == pytest.approx(5.0 + 0.01 + 0.001)


def test_a_path_of_equal_links_serialises_once() -> None:
    emulator = Emulator(load_topology("paper-8-devices"))
    emulator.send(0.0, 0, 7, bytes(37500))  # 1 ms at 300 Mbit
    assert drain(emulator)[0][0] == pytest.approx(0.004 + 0.001)


def test_packets_queue_behind_each_other() -> None:
    emulator = Emulator(pair(8e6, 0.01))
    for number in range(5):
        emulator.send(0.0, 0, 1, bytes([number]) * 1000)
    arrived = drain(emulator)
    assert [time for time, _, _ in arrived] == pytest.approx([0.011, 0.012, 0.013, 0.014, 0.015])
    assert [packet[0] for _, _, packet in arrived] == [0, 1, 2, 3, 4]


def test_directions_do_not_share() -> None:
    emulator = Emulator(pair(8e6, 0.0))
    emulator.send(0.0, 0, 1, bytes(1000))
    emulator.send(0.0, 1, 0, bytes(1000))
    assert [time for time, _, _ in drain(emulator)] == pytest.approx([0.001, 0.001])


def test_a_stars_answers_share_the_link_of_the_one_they_go_to() -> None:
    emulator = Emulator(wheel(4, 8e6, 0.001))
    for source in (1, 2, 3):
        emulator.send(0.0, source, 0, bytes(1000))
    assert [time for time, _, _ in drain(emulator)] == pytest.approx([0.003, 0.004, 0.005])


def test_the_first_arrival_goes_first() -> None:
    devices = (Host("near"), Host("far"), Host("goal"))
    links = (HostLink(("near", "r"), 8e6, 0.001), HostLink(("far", "r"), 8e6, 0.010), HostLink(("goal", "r"), 8e6, 0.0))
    emulator = Emulator(Topology("t", devices, links, (Router("r"),)))
    emulator.send(0.000, 1, 2, b"f" * 1000)
    emulator.due(0.002)
    emulator.send(0.002, 0, 2, b"n" * 1000)
    arrived = drain(emulator)
    assert [packet[:1] for _, _, packet in arrived] == [b"n", b"f"]
    assert [time for time, _, _ in arrived] == pytest.approx([0.004, 0.011])


def test_a_packet_that_crosses_the_air_twice_takes_two_turns() -> None:
    emulator = Emulator(wheel(2, float("inf"), 0.0, shared=8e6))
    for _ in range(10):
        emulator.send(0.0, 0, 1, bytes(1000))
    assert max(time for time, _, _ in drain(emulator)) == pytest.approx(0.020)


def test_a_full_queue_drops() -> None:
    emulator = Emulator(pair(8e6, 0.0, queue=0.0035))
    for _ in range(10):
        emulator.send(0.0, 0, 1, bytes(1000))
    assert len(drain(emulator)) == 4
    assert emulator.dropped == 6


def test_loss_and_jitter_stay_within_what_was_asked() -> None:
    emulator = Emulator(pair(float("inf"), 0.01, jitter=0.004, loss=0.3))
    for number in range(2000):
        emulator.send(number * 0.1, 0, 1, bytes(100))
        emulator.due(number * 0.1 + 0.05)
    assert 500 < emulator.dropped < 700


def test_a_cut_channel_drops_all() -> None:
    emulator = Emulator(pair())
    for channel in emulator.channels.values():
        channel.cut = True
    emulator.send(0.0, 0, 1, b"lost")
    assert drain(emulator) == []


TRAFFIC = st.lists(
    st.tuples(st.floats(0, 0.01), st.integers(0, 3), st.integers(0, 3), st.integers(1, 60000)), min_size=1, max_size=40
)


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])  # on a busy host
@given(TRAFFIC)
def test_nothing_is_early_lost_or_out_of_order(traffic: list[tuple[float, int, int, int]]) -> None:
    """On uneven links, between all devices, polled only when the emulator asks or a packet leaves."""
    topology = load_topology("paper-4-laptops")
    names = [device.name for device in topology.devices]
    emulator = Emulator(topology)
    sent: dict[tuple[int, int], list[tuple[float, bytes]]] = {}
    arrived: list[tuple[float, int, bytes]] = []
    for time, source, target, size in sorted(traffic):
        if source != target:
            while emulator.next_event() <= time:
                arrived += emulator.due(emulator.next_event())
            packet = (source * 4 + target).to_bytes(1, "big") * size
            emulator.due(time)
            emulator.send(time, source, target, packet)
            sent.setdefault((source, target), []).append((time, packet))
    arrived += drain(emulator)
    assert arrived == sorted(arrived, key=lambda one: one[0])
    for (source, target), packets in sent.items():
        mark = packets[0][1][:1]
        got = [(time, packet) for time, where, packet in arrived if where == target and packet[:1] == mark]
        assert [packet for _, packet in got] == [packet for _, packet in packets]
        route = (names[source], names[target])
        for (left, packet), (came, _) in zip(packets, got, strict=True):
            least = topology.latency(*route) + len(packet) * 8 / topology.bandwidth(*route)
            assert came >= left + least - 1e-9


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])  # on a busy host
@given(st.lists(st.tuples(st.floats(0, 0.02), st.integers(1, 7), st.integers(1, 65000)), min_size=2, max_size=60))
def test_a_fan_in_fills_the_link_that_it_shares_and_no_more(traffic: list[tuple[float, int, int]]) -> None:
    emulator = Emulator(load_topology("paper-8-devices"))
    arrived = []
    for time, source, size in sorted(traffic):
        arrived += emulator.due(time)
        emulator.send(time, source, 0, bytes(size))
    arrived += drain(emulator)
    total = sum(len(packet) for _, _, packet in arrived) * 8 / 300e6
    first, last = min(time for time, _, _ in traffic), max(time for time, _, _ in traffic)
    assert len(arrived) == len(traffic)
    assert first + 0.004 + total - 1e-9 <= arrived[-1][0] <= last + 0.004 + total + 1e-9


def test_nothing_leads_from_a_device_to_itself_or_beyond() -> None:
    emulator = Emulator(pair())
    for source, target in ((0, 0), (0, 2), (2, 0)):
        with pytest.raises(IndexError):
            emulator.send(0.0, source, target, b"lost")

"""The requests of the tc backend to the kernel, compared with a stored file, and made as far as the kernel allows."""

import json
import sys
from typing import Any

import pytest

from testbed.checks.verify import verify
from testbed.launch import Testbed
from testbed.network.backends import choose_backend
from tests.support.paths import DATA
from tests.support.testbed_helpers import echo_on, needs_root, pair, round_trip_ms, wheel
from tpi.errors import TestbedError
from tpi.topology.schema import load_topology, parse_topology
from tpi.topology.topology import Topology

GOLDEN = DATA / "tc_requests.json"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="tc is Linux's")

EXAMPLE = """
devices: {near: , far: }
routers: {wifi: }
links:
  - {between: [near, wifi], bandwidth: 300 Mbit, latency: 1 ms}
  - {between: [far, wifi], bandwidth: 10 Mbit, latency: 20 ms, jitter: 2 ms, loss: 0.5%}
"""


def asked(topology: Topology) -> list[dict[str, Any]]:
    """Return each request of the plan; for queueing disciplines also the bytes for the kernel."""
    from testbed.network.tc import kernel_requests

    return [
        {"node": one.node, "call": f"{one.call} {one.verb}", **one.fields, **_encoded(one.fields)}
        for one in kernel_requests(topology)
    ]


def _encoded(fields: dict[str, Any]) -> dict[str, str]:
    if fields.get("kind") not in ("tbf", "netem"):
        return {}
    from pyroute2.netlink.rtnl.tcmsg import plugins, tcmsg

    options = plugins[fields["kind"]].get_parameters(dict(fields))
    message = tcmsg()
    message["attrs"] = [["TCA_KIND", fields["kind"]], ["TCA_OPTIONS", options]]
    message.encode()
    return {"bytes": bytes(message.data[:88]).hex()}  # all of netem's; tbf's without its table of legacy rates


def test_requests_are_those_of_the_golden_file() -> None:
    assert asked(parse_topology(EXAMPLE, "example.yaml", "example")) == json.loads(GOLDEN.read_text())


def test_netem_gets_what_the_kernel_header_says() -> None:
    """tc_netem_qopt: latency and jitter in ticks of 64 ns, limit in packets, loss as a fraction of 2^32 - 1."""
    requests = asked(parse_topology(EXAMPLE, "example.yaml", "example"))
    netem = next(one for one in requests if one.get("kind") == "netem" and one["node"] == "far")
    words = [
        int.from_bytes(bytes.fromhex(netem["bytes"])[offset : offset + 4], sys.byteorder) for offset in range(52, 76, 4)
    ]
    latency, limit, loss, gap, duplicate, jitter = words
    assert latency == 20_000_000 // 64
    assert jitter == 2_000_000 // 64
    assert loss == pytest.approx(0.005 * 2**32, rel=1e-6)
    assert (limit, gap, duplicate) == (netem["limit"], 0, 0)


def test_every_device_has_a_route_to_every_other() -> None:
    topology = load_topology("paper-8-devices")
    requests = asked(topology)
    for device in topology.devices:
        targets = {one["dst"] for one in requests if one["node"] == device.name and one["call"] == "route replace"}
        assert targets == {f"{topology.address(other.name)}/32" for other in topology.devices if other is not device}


def test_the_backend_is_chosen_by_kernel_and_topology() -> None:
    shared = wheel(2, 1e8, 0.0, shared=1e8)
    assert choose_backend(pair(), "auto", has_netem=True) == "tc"
    assert choose_backend(pair(), "auto", has_netem=False) == "tun"
    assert choose_backend(shared, "auto", has_netem=True) == "tun"
    assert choose_backend(pair(latency=0.0), "tc", has_netem=False) == "tc"
    for topology, netem in ((pair(), False), (shared, True)):
        with pytest.raises(TestbedError, match="--backend tun"):
            choose_backend(topology, "tc", netem)


@needs_root
@pytest.mark.alone
def test_rates_routes_and_faults_work_without_netem() -> None:
    with Testbed.start(wheel(3, 100e6, 0.0), "tc") as bed:
        assert {one.quantity for one in verify(bed)} == {"round trip", "bandwidth"}
        with echo_on(bed, "b"):
            bed.ask("slow", device="b", bandwidth=10e6, latency=0.0)
            assert (
                round_trip_ms(bed, "a", "b", 3, 62_500)[1] > 30
            )  # 50 ms at 10 Mbit, less what a bucket lets through at once
            bed.ask("cut", device="b")
            bed.ask("heal", device="b")
            assert round_trip_ms(bed, "a", "b", 3, 62_500)[0] < 30

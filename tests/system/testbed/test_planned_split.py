"""Uneven machines at home get uneven parts, and a far one gets none. Needs root on Linux."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import TinyModel
from tests.support.testbed_helpers import TPI, needs_root
from tpi.topology.links import LinkTable

pytestmark = pytest.mark.waits

UNEVEN = """
devices: {{master: {{cpu: 0.2}}, near: {{cpu: 0.8}}, far: {{cpu: 0.8}}}}
routers: {{router: }}
links:
  - {{between: [master, router], latency: 50 us}}
  - {{between: [near, router], latency: 50 us}}
  - {{between: [far, router], latency: {far}}}
"""


PAIR = """
devices: {master: {}, a: {}, b: {}}
routers: {wifi: , switch: }
links:
  - {between: [master, wifi], latency: 100 us}
  - {between: [wifi, switch], latency: 7 ms, bandwidth: 100 Mbit}
  - {between: [a, switch], latency: 100 us, bandwidth: 1 Gbit}
  - {between: [b, switch], latency: 100 us, bandwidth: 1 Gbit}
"""
SURVEY = """
import os
from master.options import worker_addresses
from master.planning.home.asked import home_asked
from master.workers.survey import WorkerLinks
from scheduler.model.machine import LAPTOP
from tpi.text import json_text

addresses = worker_addresses((os.environ["TPI_WORKERS"],))
print(json_text(home_asked(addresses, LAPTOP, links=WorkerLinks(None)).links.to_dict()))
"""


def run_at_home(topology: Path, model: Path, *flags: str) -> tuple[dict[str, Any], str]:
    """Return the JSON of `tpi run --json` on the first device, and its warnings."""
    run = [sys.executable, "-m", "tpi.cli", "run", "-m", str(model), "-p", "Hello", "--raw", "--temp", "0", "-n", "4"]
    command = [*TPI, "run", "--no-verify", str(topology), "--", *run, "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@needs_root
def test_a_far_machine_is_left_out_and_the_tokens_are_the_same(tiny_model: Any, tmp_path: Path) -> None:
    model: TinyModel = tiny_model("llama")
    topology = tmp_path / "uneven.yaml"
    topology.write_text(UNEVEN.format(far="100 ms"))
    planned, said = run_at_home(topology, model.directory)
    assert "far left out: " in said
    assert "with all nodes; --split equal uses every node" in said
    assert "far" not in [node["name"] for node in planned["nodes"]]
    equal, said = run_at_home(topology, model.directory, "--split", "equal")
    assert "left out" not in said
    assert [node["name"] for node in equal["nodes"]] == ["master", "near", "far"]
    assert planned["token_ids"] == equal["token_ids"]


@needs_root
def test_wired_neighbours_are_seen_as_near_from_afar(tmp_path: Path) -> None:
    topology = tmp_path / "pair.yaml"
    topology.write_text(PAIR)
    command = [*TPI, "run", "--no-verify", str(topology), "--", sys.executable, "-c", SURVEY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    links = LinkTable.from_dict(json.loads(done.stdout.splitlines()[-1]))
    assert links.between(1, 2).latency_s < 0.003
    assert links.between(1, 2).bytes_per_s > 2 * links.between(0, 1).bytes_per_s
    assert min(link.latency_s for pair, link in links.links.items() if 0 in pair) > 0.006

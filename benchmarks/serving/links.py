"""Several streams at once over links of 5 ms. All answers of a batch share one sum per block.

`python -m benchmarks.serving.links` is the part that runs on a home's first device, where TPI_WORKERS names the others.
"""

import json
import os
import sys

from benchmarks.network.awake import awake
from benchmarks.network.home import MEGABIT, MILLISECOND, home, wheel
from benchmarks.result import Check, Result, Row, Table
from benchmarks.serving.server import running
from benchmarks.serving.streams import stream_rates, stream_rows
from benchmarks.support.models import smollm2
from testbed.cluster import WORKERS

NOTES = """
`tpi serve` with SmolLM2-135M in Q4_1 on the first of two, and of four, emulated devices around a router, with 5 ms and
300 Mbit from end to end. All devices share two cores, with one thread each. Greedy answers of equal length to different
questions run at once. Figures are tokens per second of all streams, and their ratio to one stream. Processors are
prevented from sleeping (`benchmarks/network/awake.py`).
"""
_LATENCY, _BANDWIDTH = 5 * MILLISECOND, 300 * MEGABIT
_AIM = 6.0


@awake()
def bench(quick: bool) -> Result:
    """Measure streams on two devices, and on four."""
    tokens, rows, checks = 8 if quick else 32, list[Row](), []
    smollm2()  # devices have no access to a server to download from
    for size in (2,) if quick else (2, 4):
        with home(wheel(size, _LATENCY, _BANDWIDTH)) as place:
            said = place.run([sys.executable, "-m", "benchmarks.serving.links", str(tokens)])
        rates = {int(count): float(rate) for count, rate in json.loads(said.splitlines()[-1]).items()}
        rows += [{"devices": size, **row} for row in stream_rows(rates)]
        checks.append(Check(f"eight streams against one, {size} devices", rates[8] / rates[1], _AIM))
    return Result("Streams over links of 5 ms", NOTES, [Table("", rows)], checks)


if __name__ == "__main__":
    with running("-c", "1024", "-t", "1", "--split", "equal", "--workers", os.environ[WORKERS]) as server:
        print(json.dumps(stream_rates(server, int(sys.argv[1]))))

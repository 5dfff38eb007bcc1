"""A master for tests that stop its process: it computes a step for every line on stdin.

`python -m tests.support.processes.idle_master ADDRESS ...` prints "ready", then after each step the number of steps
that every worker has run, or the step's error.
"""

import sys

from master.workers.cluster import Cluster
from tests.support.cluster.cluster_helpers import MadeUpModel, step
from tpi.errors import NodeError


def _say(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _step(cluster: Cluster, number: int) -> object:
    try:
        cluster.step(step(cluster.session, 1, number))
        return [stats.steps for stats in cluster.stats()]
    except NodeError as error:
        return error


def main(addresses: list[str]) -> None:
    model = MadeUpModel()
    with Cluster.connect(addresses) as cluster:
        cluster.assign(model.split(cluster.session, 1, cluster.peers())[1:], model)
        _say("ready")
        for number, _ in enumerate(sys.stdin):
            _say(_step(cluster, number))


if __name__ == "__main__":
    main(sys.argv[1:])

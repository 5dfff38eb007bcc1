"""Forecasts of layouts of stages: `python -m benchmarks.network.forecast TASK` on the first device of a home.

It measures the workers of `TPI_WORKERS`, their disks and all links as a run does, and prints one JSON object: the
seconds of a token by layout, and by part.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from master.options import worker_addresses
from master.planning.home.asked import home_asked
from master.planning.home.dealing import HomeModel
from master.planning.node import NodeFlags, planned_node
from master.planning.problem import request_of
from master.planning.shapes import model_shape
from master.workers.survey import WorkerLinks, measure_disks
from scheduler.model.home.layouts import best_layout, evaluate
from scheduler.model.home.stages import Layout
from tpi.config import default_cache
from tpi.text import json_text

AUTO = "auto"


def task(model: str, memory: int, context: int, layouts: dict[str, Sequence[tuple[int, int, Sequence[int]]]]) -> str:
    """Return the TASK argument of this program, as JSON.

    Args:
        model: the model.
        memory: bytes of memory of the first device.
        context: length of the context in tokens.
        layouts: by name, for each stage the first layer, the layer after the last, and the ranks.
    """
    return json.dumps({"model": model, "memory": memory, "context": context, "layouts": layouts})


def main() -> None:
    """Print the forecasts of the layouts in the task, and of the best one as `auto`."""
    asked = json.loads(sys.argv[1])
    cache = default_cache()
    own = planned_node(NodeFlags(memory=asked["memory"], threads=1), cache, list((cache / "packs").glob("*/*"))).machine
    workers, links = worker_addresses((os.environ["TPI_WORKERS"],)), WorkerLinks(None)
    home = home_asked(workers, own, links=links)
    if home.unknown_disks:
        measure_disks(home.unknown_disks)
        home = home_asked(workers, own, links=links)
    shape = model_shape(asked["model"], "auto", cache, sum(machine.memory for machine in home.machines))
    problem = HomeModel(shape, home, request_of(shape.config, None, None, 1, asked["context"])).staged
    found: dict[str, Layout | None] = {
        name: evaluate(problem, [(first, last, tuple(ranks)) for first, last, ranks in stages])
        for name, stages in asked["layouts"].items()
    }
    found[AUTO] = best_layout(problem)
    print(json_text({name: _fields(layout, home.names) for name, layout in found.items() if layout}))


def _fields(layout: Layout, names: Sequence[str]) -> dict[str, Any]:
    stages = [
        f"{stage.first}-{stage.last - 1}:{'+'.join(names[rank] for rank in stage.split.members)}"
        for stage in layout.stages
    ]
    parts = {"compute": layout.compute, "sums and hops": layout.exchange + layout.hops, "disk": layout.disk}
    return {"seconds": layout.seconds, "parts": parts, "stages": ", ".join(stages)}


if __name__ == "__main__":
    main()

"""`python -m benchmarks [NAME ...] [--quick]`: measure, save benchmarks/results/NAME.json, write docs/benchmarks.md."""

import argparse
from collections.abc import Callable
from datetime import date
from importlib import import_module
from pathlib import Path

from benchmarks.document import section, write_document
from benchmarks.machine import Neighbours, describe
from benchmarks.result import Result, Run
from tpi.devices.host import open_host

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"

# each a function that takes `quick` and returns a Result; the order is that of the document
BENCHMARKS = {
    "kernels": "benchmarks.adapters:kernels",
    "peers": "benchmarks.peers:bench",
    "parity": "benchmarks.parity:bench",
    "two_nodes": "benchmarks.two_nodes:bench",
    "startup": "benchmarks.startup:bench",
    "allreduce": "benchmarks.adapters:allreduce",
    "memory": "benchmarks.memory:bench",
    "offload": "benchmarks.offload:bench",
    "steady": "benchmarks.steady:bench",
    "peaks": "benchmarks.peaks:bench",
    "seventy": "benchmarks.seventy:bench",
    "home_links": "benchmarks.home_links:bench",
    "home_network": "benchmarks.home_network:bench",
    "home_prefill": "benchmarks.home_prefill:bench",
    "tensor_parallel": "benchmarks.tensor_parallel:bench",
}


def load(name: str) -> Callable[[bool], Result]:
    """Import one benchmark."""
    module, _, attribute = BENCHMARKS[name].partition(":")
    bench: Callable[[bool], Result] = getattr(import_module(module), attribute)
    return bench


def render() -> None:
    """Write the document from all results that are saved."""
    saved = [RESULTS / f"{name}.json" for name in BENCHMARKS]
    write_document([Run.load(path) for path in saved if path.exists()], ROOT / "docs")


def main() -> None:
    """Run the named benchmarks, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="few rounds, printed only: to see that it works")
    parser.add_argument("--render", action="store_true", help="measure nothing, render the document again")
    options = parser.parse_args()
    if unknown := set(options.names) - BENCHMARKS.keys():
        parser.error(f"no benchmark called {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    if open_host().kernels.isa() == "numpy":
        parser.error("the native kernels are not built; run `make install`")
    for name in () if options.render else options.names or BENCHMARKS:
        neighbours = Neighbours()
        result = load(name)(options.quick)
        run = Run(name, describe(), date.today().isoformat(), neighbours.share(), result)
        print(section(run), flush=True)
        if not options.quick:
            run.save(RESULTS)
            render()
    if options.render:
        render()


if __name__ == "__main__":
    main()

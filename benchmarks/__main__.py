"""`python -m benchmarks [NAME ...] [--quick]`: measure, keep the run in benchmarks/results, write docs/benchmarks.md.

`python -m benchmarks compare --base COMMIT ...` compares two commits instead; see `benchmarks.compare`.
"""

import argparse
import sys
import time
from datetime import date
from pathlib import Path

from benchmarks import compare
from benchmarks.page.document import Section, markdown, write_document
from benchmarks.registry import BENCHMARKS
from benchmarks.result import History, Run
from benchmarks.support.code import commit, digest
from benchmarks.support.machine import Neighbours, describe
from benchmarks.support.several import announce, run_all
from tpi.devices.host import open_host

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
QUICK_S = 290  # seconds for all benchmarks that `--quick` runs: under five minutes


def measure(name: str, quick: bool) -> Run:
    """Run one benchmark in this process."""
    benchmark, neighbours, begun = BENCHMARKS[name], Neighbours(), time.monotonic()
    of = {"commit": commit(), "code": digest(benchmark.measures)}
    result = benchmark.load()(quick)
    seconds = time.monotonic() - begun
    return Run(name, describe(), date.today().isoformat(), neighbours.share(), result, **of, seconds=seconds)


def render() -> None:
    """Write docs/benchmarks.md from all saved results."""
    write_document([History.load(RESULTS, name) for name in BENCHMARKS], ROOT / "docs")


def one(name: str, quick: bool) -> None:
    """Run a benchmark and print its section. Unless it is `quick`, keep the run and write the document."""
    run = measure(name, quick)
    print(markdown(Section.of(History(name, [run]))), flush=True)
    if not quick:
        History.load(RESULTS, name).with_run(run).save(RESULTS)
        render()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="test the benchmarks: few rounds, less than five minutes in all, results are only printed",
    )
    parser.add_argument(
        "--list", action="store_true", help="list the time and requirements of each benchmark, and exit"
    )
    parser.add_argument(
        "--render", action="store_true", help="render the document from saved results, without measuring"
    )
    return parser


def main(words: list[str]) -> int:
    """Run the benchmarks that are named, or all. Return 1 if a benchmark failed."""
    if words[:1] == ["compare"]:
        return compare.main(words[1:])
    parser = _parser()
    options = parser.parse_args(words)
    if unknown := set(options.names) - BENCHMARKS.keys():
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}; choose from {', '.join(BENCHMARKS)}")
    if options.render:
        render()
        return 0
    names = options.names or [name for name, found in BENCHMARKS.items() if found.quick or not options.quick]
    took = {name: [run.seconds for run in History.load(RESULTS, name).runs if run.seconds] for name in names}
    if options.list:
        announce(names, took)
        return 0
    if open_host().kernels.isa() == "numpy":
        parser.error("the native kernels are not built; run `make install`")
    if len(names) == 1:
        one(names[0], options.quick)
        return 0
    announce(names, took)
    return run_all(names, QUICK_S if options.quick else None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

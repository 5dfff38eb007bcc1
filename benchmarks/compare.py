"""Comparison of two commits: `python -m benchmarks compare --base COMMIT [NAME ...]` prints medians of paired ratios.

Each commit is built and installed in an environment of its own, on top of the packages that are installed already. The
command lines of both are measured in turn; the order changes from pair to pair. A ratio above 1 means that HEAD is
better: a higher speed, or fewer seconds. For peak memory the ratio is HEAD's over the base's, followed by the
difference in MiB.
"""

import argparse
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks.support.code import ROOT
from benchmarks.support.probes import PROBES, Figures, Side

PAIRS = 15
LEAST, MORE_MIB = 0.95, 2.0  # least ratio of speeds, and most additional MiB, that need no explanation
Probe = Callable[[Side], Figures]


@contextmanager
def built(commit: str, folder: Path) -> Iterator[Side]:
    """Install `commit` in a virtual environment in `folder`. Remove the worktree of the commit afterwards."""
    tree, venv = folder / "tree", folder / "venv"
    _run("git", "-C", str(ROOT), "worktree", "add", "--quiet", "--detach", str(tree), commit)
    try:
        _run(sys.executable, "-m", "venv", "--without-pip", str(venv))
        site = venv / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        here = ("--no-build-isolation",) if find_spec("scikit_build_core") else ()  # else pip downloads it
        install = ("pip", "install", "--quiet", "--no-deps", *here, "--target", str(site))
        _run(sys.executable, "-m", *install, str(tree))
        (site / "packages.pth").write_text("\n".join(_packages()))  # after its own; .pth files there are not read
        yield Side(str(venv / "bin" / "python"), folder / "cache", tree)
    finally:
        _run("git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree))


def in_pairs(base: Side, head: Side, probe: Probe, pairs: int) -> list[tuple[Figures, Figures]]:
    """Measure the base and HEAD alternately, `pairs` times, after one unmeasured run of each that fills its cache."""
    for side in (base, head):
        probe(side)
    found = []
    for number in range(pairs):
        order = (base, head) if number % 2 else (head, base)
        figures = {side: probe(side) for side in order}
        found.append((figures[base], figures[head]))
    return found


def verdict(name: str, pairs: Sequence[tuple[Figures, Figures]]) -> tuple[str, bool]:
    """Return a line on one figure, and False if the figure is so much worse that it needs an explanation."""
    both = [(base[name], head[name]) for base, head in pairs]
    before, after = (median(column) for column in zip(*both, strict=True))
    values = f"{before:.4g} -> {after:.4g}"
    if name.endswith("MiB"):
        more = median(head - base for base, head in both)
        return f"{name:44} {median(head / base for base, head in both):.3f} ({more:+.1f}; {values})", more <= MORE_MIB
    ratios = [base / head if name.endswith(", s") else head / base for base, head in both]
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    return f"{name:44} {median(ratios):.3f} ({spread}; {values})", median(ratios) >= LEAST


def main(words: Sequence[str]) -> int:
    """Compare the two commits and print the figures; return 1 if a figure needs an explanation."""
    options = _parsed(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # unlike a kill, this removes the worktrees
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tpi-compare-"))) for _ in range(2)]
        base, head = (stack.enter_context(built(*one)) for one in zip((options.base, "HEAD"), folders, strict=True))
        fine = [
            _report(name, options.base, in_pairs(base, head, PROBES[name], options.pairs)) for name in options.names
        ]
    return int(not all(fine))


def _report(probe: str, base: str, pairs: Sequence[tuple[Figures, Figures]]) -> bool:
    print(f"{probe}: medians of {len(pairs)} pairs, HEAD beside {base} (least to most; medians)", flush=True)
    lines = [verdict(name, pairs) for name in pairs[0][0]]
    for line, fine in lines:
        print(f"  {line}{'' if fine else '  TO BE EXPLAINED'}", flush=True)
    return all(fine for _, fine in lines)


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(PROBES)}; default: all")
    parser.add_argument("--base", required=True, metavar="COMMIT", help="what HEAD is compared with")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"at least 1; default: {PAIRS}")
    options = parser.parse_args(words)
    if unknown := set(options.names) - PROBES.keys():
        parser.error(f"unknown comparison {', '.join(sorted(unknown))}; choose from {', '.join(PROBES)}")
    if options.pairs < 1:
        parser.error("--pairs must be at least 1")
    options.names = options.names or list(PROBES)
    return options


def _packages() -> list[str]:
    """Return the folders of packages that this Python uses, without the standard library."""
    standard = Path(sysconfig.get_path("stdlib"))
    folders = [Path(entry) for entry in sys.path if entry]
    return [str(one) for one in folders if one.is_dir() and one not in (standard, standard / "lib-dynload", ROOT)]


def _run(*command: str) -> None:
    subprocess.run(command, check=True)

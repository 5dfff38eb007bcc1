"""The architecture: imports follow the table of layers, and names in docs/ exist."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path
from pkgutil import resolve_name

import pytest

from tests.support.paths import ROOT

ALLOWED = {
    "tpi": {"tpi"},
    "allreduce": {"tpi", "allreduce"},
    "scheduler": {"tpi", "scheduler"},
    "worker": {"tpi", "allreduce", "scheduler", "worker"},
    "master": {"tpi", "allreduce", "scheduler", "worker", "master"},
    "testbed": {"tpi", "allreduce", "scheduler", "worker", "master", "testbed"},
}

WITHIN_TPI = ("system", "sources", "families", "pack", "kernels", "devices", "keys", "net")  # each imports what is left


def imported_rooms(path: Path) -> set[str]:
    """Return the top-level packages of this project that a file imports, anywhere in it."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            rooms |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import; path equals import name here"
            rooms.add((node.module or "").split(".")[0])
    return rooms & ALLOWED.keys()


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_point_down(room: str) -> None:
    files = list((ROOT / room).rglob("*.py"))
    assert files
    back = {str(path): found for path in files if (found := imported_rooms(path) - ALLOWED[room])}
    assert not back


@pytest.mark.parametrize("room", WITHIN_TPI)
def test_imports_point_down_within_tpi(room: str) -> None:
    below = {*WITHIN_TPI[: WITHIN_TPI.index(room) + 1]}
    found = {
        str(file): node.module
        for file in (ROOT / "tpi" / room).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (part := f"{node.module}.".split(".")[1]) in WITHIN_TPI
        if part not in below
    }
    assert not found


def test_the_direction_test_sees_an_arrow_that_points_back(tmp_path: Path) -> None:
    offender = tmp_path / "offender.py"
    offender.write_text("def late():\n    from master.generation.engine import Engine\n    return Engine\n")
    assert imported_rooms(offender) - ALLOWED["scheduler"] == {"master"}


def test_top_level_is_the_agreed_one() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages >= ALLOWED.keys()
    assert packages <= ALLOWED.keys() | {"tests", "benchmarks"}


def test_tests_share_through_support_alone() -> None:
    """No test module imports another, and none imports benchmarks, except tests of the benchmarks."""
    tests, modules = ROOT / "tests", re.compile(r"(?:from|import) (tests\.(?:unit|integration|system)|benchmarks)\b")
    of_benchmarks = {*(tests / "unit/benchmarks").glob("*.py"), tests / "unit/test_documents.py"}
    for path in tests.rglob("*.py"):
        found = set(modules.findall(path.read_text()))
        assert not found - ({"benchmarks"} if path in of_benchmarks else set()), path


def documented_symbols() -> list[str]:
    """Return back-quoted dotted names of the project's packages in docs/, except the page of figures."""
    pages = sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs/benchmarks.md"})
    text = "\n".join(page.read_text() for page in pages)
    return sorted(set(re.findall(rf"`((?:{'|'.join(ALLOWED)})\.[A-Za-z_][\w.]*)`", text)))


@pytest.mark.parametrize("room", ALLOWED)
def test_the_diagram_has_every_room_inside_a_room(room: str) -> None:
    diagram = (ROOT / "docs/architecture.md").read_text().split("```")[1]
    within = {package.parent.name for package in (ROOT / room).glob("*/__init__.py")}
    assert f"{room}/" in diagram
    assert not {name for name in within if not re.search(rf"\b{name}\b", diagram)}


def test_the_glossary_has_few_words() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| ([a-z][\w ,-]*) \|", page.split("## Words")[1].split("\n## ")[0], re.MULTILINE)
    words = [word for row in rows for word in row.split(", ") if row != "word"]
    assert 20 < len(words) <= 40
    assert len(set(words)) == len(words)


def test_architecture_names_symbols() -> None:
    assert len(documented_symbols()) > 20


def exists(symbol: str) -> bool:
    try:
        return resolve_name(symbol) is not None
    except (ImportError, AttributeError):
        return False


def test_documented_symbols_exist() -> None:
    assert not [symbol for symbol in documented_symbols() if not exists(symbol)]
    assert not exists("tpi.config.NoSuchThing")


def test_no_file_is_over_400_lines() -> None:
    lengths = {path: len(path.read_text().splitlines()) for room in ALLOWED for path in (ROOT / room).rglob("*.py")}
    assert not {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > 400}


def test_no_folder_has_under_three_files() -> None:
    folders = {file.parent for room in ALLOWED for file in (ROOT / room).rglob("*.py")}
    assert not {str(folder) for folder in folders if len(list(folder.glob("*.py"))) < 3}


LAYERS = {
    "allreduce": (
        "chunks.py flight.py stages.py", "base.py predict.py", "cache.py deadline.py", "connections.py",
        "hops.py transport.py", "measure.py networked.py", "algorithms choose.py", "auto.py",
    ),
    "master": (
        "confined vocabulary", "options.py text", "workers", "deployment", "generation profiling", "reporting",
        "planning", "joining", "session.py", "api chat commands.py models", "batch",
    ),
    "scheduler": ("free.py model storage", "budget.py slots", "transfer window", "neurons weights.py", "demand"),
    "testbed": (
        "cgroups.py commands.py control.py state.py", "network processes.py", "enter.py faults.py holder.py",
        "launch.py", "checks cluster.py",
    ),
    "tpi": (
        "errors.py help.py progress.py text.py wrap.py", "finite.py flags.py partition.py paths.py system",
        "config.py console.py trace.py", "cachelimit.py cli.py keys sources topology", "families", "pack", "kernels",
        "stateheads.py", "block.py devices", "calibration net sparsity",
    ),
    "worker": (
        "commands.py node_plan.py profile.py trial.py", "shards", "cachecommands.py equipment.py plan",
        "measure service", "node", "accelerator", "neurons pipelines", "demand",
    ),
}  # fmt: skip
"""The parts of each room in layers, from the bottom up. What a module needs when it is loaded lies below it."""


def test_imports_inside_a_room_follow_its_layers_downward() -> None:
    level = {
        f"{room}/{part}": number
        for room, layers in LAYERS.items()
        for number, layer in enumerate(layers)
        for part in layer.split()
    }

    def part(module: str) -> str:
        path = Path(*module.split(".")[:2])
        return path.as_posix() if (ROOT / path).is_dir() else f"{path.as_posix()}.py"

    pairs = {(part(name), part(one)) for name, wanted in module_graph().items() for one in wanted}
    inside = {(one, other) for one, other in pairs if one != other and one.split("/")[0] == other.split("/")[0]}
    rooms = {f"{room}.py" for room in LAYERS} | set(LAYERS)
    assert {one for pair in pairs for one in pair} - rooms <= level.keys()
    assert not {pair for pair in inside - {p for p in inside if rooms & set(p)} if level[pair[0]] <= level[pair[1]]}


def module_graph() -> dict[str, set[str]]:
    """Return the modules of the package, each with the modules that it imports when it is loaded."""
    files = [file for room in ALLOWED for file in (ROOT / room).rglob("*.py")]
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    graph = {}
    for name, file in modules.items():
        found = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom)]
        wanted = {f"{node.module}.{alias.name}" for node in found for alias in node.names}
        graph[name] = (wanted | {str(node.module) for node in found}) & modules.keys() - {name}
    return graph


def test_no_circle_of_imports() -> None:
    graph = module_graph()
    assert graph["master.session"]
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_whatever_is_printed_passes_the_filter() -> None:
    """No other way to print exists than `tpi.system.streams`: no other stream, no bytes, and no unfiltered console."""
    past = re.compile(
        r"sys\.__std|\bstd(?:out|err)\.buffer|os\.write\([12],|\bunfiltered\b|\bConsole\(|[^.\w]print\(|open\(\s*[12],"
    )
    may = {
        "tpi/system/streams.py", "tpi/console.py",  # the filter
        "master/reporting/output.py",  # an answer's bytes, and styled text that was filtered
        "master/chat/readers.py",  # prompt_toolkit, which shows what the user types
        "tpi/system/interrupts.py",  # a warning of our own within a signal
    }  # fmt: skip
    found = {
        str(path.relative_to(ROOT))
        for room in ALLOWED
        for path in (ROOT / room).rglob("*.py")
        if past.search(path.read_text())
    }
    assert found == may
    entries = {"tpi/cli.py", "worker/commands.py", "testbed/enter.py"}
    assert all("filter_output()" in (ROOT / path).read_text() for path in entries)

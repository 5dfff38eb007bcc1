"""Other makers' clients against one `tpi serve`: a table of the checks of each client and of the failures."""

import json
import os
import subprocess
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from benchmarks.interop.checks import KINDS
from benchmarks.result import Check, Result, Row, Table
from benchmarks.serving.server import Running, running
from benchmarks.support.code import ROOT

NOTES = """
The newest versions of popular clients, each in an environment of its own, against one `tpi serve` of SmolLM2-135M with
a key. `benchmarks/interop` has the checks of each client. It lists the models. A question is answered as one piece and
as a stream. A tool is called, its result is sent back, and the answer continues. An answer follows a schema. A refusal
(of a field, a model, a key) raises the client's own exception. Texts become embeddings. The same is repeated with the
responses API, if the client supports it, with a tool that the server ignores. The first tool call is required,
because a model of this size makes none by itself. A field is empty if the client does not support the feature.
"""
_KEY, _MODEL = "house", "smollm2-135m"
_PYTHON = {  # clients by the distribution that has them
    "openai": "openai",
    "anthropic": "anthropic",
    "litellm": "litellm",
    "llm": "llm",
    "langchain": "langchain-openai",
    "pydantic_ai": "pydantic-ai-slim[openai,anthropic]",
    "agents": "openai-agents",
}
_NODE = {
    "openai": "@ai-sdk/openai",
    "compatible": "@ai-sdk/openai-compatible",
    "anthropic": "@ai-sdk/anthropic",
}
_QUICK = ("openai", "anthropic")
_LIMIT_S = 900  # of one client, and of what is installed
_PASSED = "yes"


def bench(quick: bool) -> Result:
    """Try every client, or only those of OpenAI and Anthropic if `quick`."""
    names = _QUICK if quick else tuple(_PYTHON)
    with TemporaryDirectory(prefix="tpi-interop-") as made:
        folder = Path(made)
        python = _python(folder / "python", [_PYTHON[name] for name in names])
        node = None if quick else _node(folder / "node")
        with running("-c", "4096", "--api-key", _KEY, "--alias", _MODEL) as server:
            rows = [
                _tried(server, _PYTHON[name], _version(python, _PYTHON[name]), *_module(python, name)) for name in names
            ]
            if node is not None:
                rows += [
                    _tried(server, one, _node_version(node, one), *_script(node, name)) for name, one in _NODE.items()
                ]
    return _result(rows)


def _result(rows: Sequence[Row]) -> Result:
    tried = [(row, kind, str(row[kind])) for row in rows for kind in KINDS if row[kind]]
    failed: list[Row] = [
        {"client": row["client"], "check": kind, "because": said} for row, kind, said in tried if said != _PASSED
    ]
    shown = [
        {name: cell if name not in KINDS or cell in ("", _PASSED) else "no" for name, cell in row.items()}
        for row in rows
    ]
    tables = [Table(f"{len(tried)} checks", shown), *([Table("What failed", failed)] if failed else [])]
    check = Check("failed checks of third-party clients", len(failed), 0, within=0)
    return Result("Third-party clients", NOTES, tables, [check], timed=False)


def _tried(
    server: Running, name: str, version: str, command: Sequence[str], folder: Path, more: Mapping[str, str]
) -> Row:
    """Run the checks of one client and return its row of the table.

    Raises:
        RuntimeError: if the client failed or printed nothing.
    """
    begun = perf_counter()
    environment = os.environ | more
    done = subprocess.run(
        [*command, server.url, _KEY, _MODEL],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False,
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"{name} did not finish: {done.stderr[-500:]}")
    found = json.loads(lines[-1])
    cells: Row = {kind: (" ".join(found[kind].split()) or _PASSED) if kind in found else "" for kind in KINDS}
    return {"client": name.partition("[")[0], "version": version, **cells, "s": perf_counter() - begun}


def _module(python: Path, name: str) -> tuple[list[str], Path, dict[str, str]]:
    """Return the command of a Python client, its working directory and its environment."""
    own = {
        "PYTHONPATH": str(ROOT),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LLM_USER_PATH": str(python.parents[1] / "llm"),
    }
    return [str(python), "-W", "ignore", "-m", f"benchmarks.interop.{name}_client"], ROOT, own


def _script(node: Path, name: str) -> tuple[list[str], Path, dict[str, str]]:
    return ["node", str(ROOT / "benchmarks/interop/ai_sdk.mjs"), name], node, {"AI_SDK_LOG_WARNINGS": "false"}


def _python(folder: Path, distributions: Sequence[str]) -> Path:
    """Make a virtual environment with `distributions` and return its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    _run([str(python), "-m", "pip", "install", "-q", *distributions], folder)
    return python


def _version(python: Path, distribution: str) -> str:
    code = "import sys, importlib.metadata as found; print(found.version(sys.argv[1]))"
    return _run([str(python), "-c", code, distribution.partition("[")[0]], python.parent)


def _node(folder: Path) -> Path:
    folder.mkdir()
    (folder / "package.json").write_text('{"type": "module", "private": true}')
    _run(["npm", "install", "--no-audit", "--no-fund", "--silent", "ai", "zod", *_NODE.values()], folder)
    return folder


def _node_version(folder: Path, package: str) -> str:
    found = [
        json.loads((folder / f"node_modules/{one}/package.json").read_text())["version"] for one in (package, "ai")
    ]
    return f"{found[0]} (ai {found[1]})"


def _run(command: Sequence[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr[-500:]}")
    return done.stdout.strip()

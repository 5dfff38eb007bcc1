"""`python -m benchmarks.trust.streams --kills 200 --freezes 100`: faults under eight streams of `tpi serve`.

Every stream must carry the same tokens as without a fault, to its end. Afterwards no resource may be left in use.
"""

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from time import monotonic

import httpx
import psutil

from benchmarks.result import Check, Result, Table
from benchmarks.trust.strikes import WORKERS, Recoveries, checks, rows, striking
from tests.support.commands import TPI, clean
from tests.support.house import Laptop, house, until
from tests.support.models import make_model

NOTES = """
`tpi serve` with a tiny model on a master and three workers of this machine, eight streams of 120 tokens at a time over
HTTP. During the answers, at a moment drawn by seed, one worker is killed, or is frozen and woken after the answers.
Every stream must carry the tokens of a stream without a fault. Figures are seconds of the longest pause in any of the
eight streams, and seconds from the fault until the server reports that it goes on without the worker. Afterwards all
resources that remain are counted: pages in use, new descriptors and threads of the server, files, and processes.
"""
STREAMS, LENGTH = 8, 120
_FULL, _QUICK = {"kill": 200, "freeze": 100}, {"kill": 4, "freeze": 2}
_TIMEOUT_S = 60.0
_SETTLE_S = 30.0  # for connections that are closing; the server keeps one that is idle for 5 s


@dataclass
class Heard:
    """One stream: its tokens, how it ended, and its longest pause in seconds."""

    tokens: list[str] = field(default_factory=list)
    end: str = ""
    pause: float = 0.0
    last: float = 0.0  # when its last token came, `monotonic` seconds


@dataclass
class Server:
    """A running `tpi serve`; `said` holds the moments at which it reported that it goes on without a worker."""

    url: str
    process: psutil.Process
    said: list[float]

    def left(self) -> Counter[str]:
        """Count the server's threads, and its descriptors by kind: "socket:[]", "/var/cache/tpi/uses"."""
        kinds = Counter({"thread": self.process.num_threads()})
        for descriptor in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # the descriptor was closed in the meantime
                kinds[_kind(descriptor.readlink())] += 1
        return kinds


def _kind(target: Path) -> str:
    """Return the kind of file that a descriptor refers to: its target without number or name."""
    return str(target.parent) if target.is_absolute() else re.sub(r"\d+", "", str(target))


@dataclass
class Struck:
    """Recoveries by kind of fault, messages about changed streams, and messages about resources left behind."""

    found: dict[str, Recoveries]
    changed: list[str]
    left: list[str]


@contextmanager
def served(root: Path, model: Path, laptops: Sequence[Laptop]) -> Iterator[Server]:
    """Start the server on `laptops`, and read its stderr as it is written."""
    command = [
        *TPI,
        "serve",
        "--port",
        "0",
        "-q",
        "-m",
        str(model),
        "--workers",
        ",".join(one.address for one in laptops),
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=clean(root / "m"), **pipes) as process:  # type: ignore[call-overload]
        said: list[float] = []
        reader = Thread(target=_read, args=(process.stderr, said))
        reader.start()
        try:
            line = next(line for line in process.stdout if " is served at " in line)
            yield Server(re.findall(r"http://[^;\s]+", line)[0], psutil.Process(process.pid), said)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(_TIMEOUT_S)
            reader.join()


def _read(lines: Iterator[str], said: list[float]) -> None:
    said.extend(monotonic() for line in lines if "going on with" in line)


def together(url: str, at: Callable[[int], None] = lambda count: None) -> list[Heard]:
    """Run eight streams at once to their ends. After each token, call `at` with the number of tokens of all streams."""
    heard = [Heard() for _ in range(STREAMS)]

    def one_more() -> None:
        at(sum(len(one.tokens) for one in heard))

    async def all_of_them() -> list[Heard]:
        async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S) as http:
            await asyncio.gather(*(_stream(http, number, one, one_more) for number, one in enumerate(heard)))
        return heard

    return asyncio.run(all_of_them())


async def _stream(http: httpx.AsyncClient, number: int, heard: Heard, one_more: Callable[[], None]) -> None:
    body = {"messages": [{"role": "user", "content": f"Laptop {number}"}], "max_tokens": LENGTH, "temperature": 0,
            "stream": True, "ignore_eos": True, "logprobs": True}  # fmt: skip
    heard.last = monotonic()
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            heard.end = line or heard.end
            if tokens := _tokens(line):
                now = monotonic()
                heard.pause, heard.last = max(heard.pause, now - heard.last), now
                heard.tokens += tokens
                one_more()


def _tokens(line: str) -> list[str]:
    if not line.startswith("data: {"):
        return []
    choices = json.loads(line[6:]).get("choices", ())
    return [one["token"] for choice in choices for one in (choice["logprobs"] or {"content": []})["content"]]


def measure(root: Path, counts: dict[str, int]) -> Struck:
    """Strike workers repeatedly under eight streams, and return the results. `root` is an empty folder."""
    (root / "model").mkdir()
    model = make_model("llama", root / "model")
    found, changed = {kind: Recoveries() for kind in ("none", *counts)}, list[str]()
    with house(root, WORKERS) as laptops:
        with served(root, model.directory, laptops) as server:
            wanted = together(server.url)
            found["none"].pauses = [max(one.pause for one in together(server.url)) for _ in range(5)]
            before, files = server.left(), _files(root)
            for kind, count in counts.items():
                for seed in range(count):
                    changed += _strike(server, laptops, (kind, seed), wanted, found[kind])
            left = _left(server, before)
        left += [f"the file {name}" for name in sorted(_files(root) - files)]
        left += [f"process {child.pid} of the server" for child in psutil.Process().children(recursive=True)
                 if child.pid not in {one.process.pid for one in laptops if one.process}]  # fmt: skip
    return Struck(found, changed, left)


def _strike(
    server: Server, laptops: list[Laptop], which: tuple[str, int], wanted: list[Heard], into: Recoveries
) -> list[str]:
    """Make one fault under eight streams, and restore all workers. Return a message for each wrong stream.

    The recovery is added to `into`.
    """
    kind, seed = which
    with striking(kind, laptops, seed, STREAMS * LENGTH) as (strike, at):
        heard = together(server.url, at)
    pause = max(one.pause for one in heard)
    strike.undo()
    noticed = [moment - strike.at for moment in server.said if moment > strike.at][:1]
    if noticed and max(one.last for one in heard) > strike.at:
        into.pauses.append(pause)
        into.noticed += noticed
    else:
        into.missed += 1
    until(lambda: _whole(server))
    print(f"{kind} {seed}: {pause:.2f} s, noticed after {noticed}", file=sys.stderr, flush=True)
    return [
        f"{kind} {seed}, stream {number}: {one.tokens} and {one.end[:200]}, not {right.tokens}"
        for number, (one, right) in enumerate(zip(heard, wanted, strict=True))
        if (one.tokens, one.end) != (right.tokens, "data: [DONE]")
    ]


def _whole(server: Server) -> bool:
    """Generate a short answer, so that restored workers join. Return True if all workers take part."""
    body = {"prompt": "Hello", "max_tokens": 2, "temperature": 0}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=_TIMEOUT_S).raise_for_status()
    return len(httpx.get(f"{server.url}/house", timeout=_TIMEOUT_S).json()["nodes"]) == 1 + WORKERS


def _left(server: Server, before: Counter[str]) -> list[str]:
    """List the server's resources that it did not have before the first fault. Connections get time to close first."""
    together(server.url)
    give_up = monotonic() + _SETTLE_S
    while (more := server.left() - before) and monotonic() < give_up:
        Event().wait(0.1)
    metrics = httpx.get(f"{server.url}/metrics", timeout=_TIMEOUT_S).text
    used = re.findall(r"^vllm:kv_cache_usage_perc\S* (\S+)", metrics, re.MULTILINE)
    pages = [] if list(map(float, used)) == [0.0] else [f"pages in use: {used}"]
    return pages + [f"{count} more of {kind!r}, where {before[kind]} were" for kind, count in more.items()]


def _files(root: Path) -> set[str]:
    """Return the files below `root` and those of TPI's shared memory.

    Cached shards and the marks of live processes are left out.
    """
    shared = Path("/dev/shm")
    names = {str(path) for path in root.rglob("*") if path.is_file() and not _kept(path)}
    return names | ({str(path) for path in shared.glob("tpi*")} if shared.is_dir() else set())


def _kept(path: Path) -> bool:
    if path.parent.name == "uses":
        return psutil.pid_exists(int(path.name.partition("-")[0]))
    return path.suffix in (".shard", ".used")


def result(struck: Struck) -> Result:
    """Convert `struck` to the result that the page shows."""
    own = [
        Check("streams with a token lost, repeated or changed", len(struck.changed), 0, within=0),
        Check("pages, descriptors, threads, files and processes left", len(struck.left), 0, within=0),
    ]
    return Result("Recovery under eight streams", NOTES, [Table("", rows(struck.found))], [*own, *checks(struck.found)])


def bench(quick: bool) -> Result:
    """Measure 200 kills and 100 freezes, or a few of each if `quick`."""
    with tempfile.TemporaryDirectory() as name:
        return result(measure(Path(name), _QUICK if quick else _FULL))


def main() -> None:
    """Print the table, and the messages about changed streams and leftovers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=_FULL["kill"])
    parser.add_argument("--freezes", type=int, default=_FULL["freeze"])
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        struck = measure(Path(name), {"kill": flags.kills, "freeze": flags.freezes})
    print(*rows(struck.found), *struck.changed, *struck.left, sep="\n")
    sys.exit(bool(struck.changed or struck.left))


if __name__ == "__main__":
    main()

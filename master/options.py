"""The command line's flags, gathered into frozen dataclasses before anything is constructed."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click

from master.sampler import Sampling
from tpi.cachelimit import CacheLimit, cache_limit_option
from tpi.config import default_cache, parse_size
from tpi.errors import UsageError
from tpi.kv import KvDtype
from tpi.wire import wire_names

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class Placement:
    """Which model, on which nodes, within which limits. Sizes in bytes; None means: choose."""

    model: str
    local: int = 0
    workers: tuple[str, ...] = ()
    split: str | None = None
    dtype: str = "auto"
    context: int | None = None
    memory: int | None = None
    threads: int | None = None
    kv_dtype: KvDtype | None = None
    collective: str | None = None
    wire: str | None = None
    scheduler: bool = True  # off: every weight in memory, whatever --memory says
    window: int = 0  # blocks in memory at once, as in the TPI-LLM paper; 0: the fastest that fits
    retain: int = 0  # with `window`: keep one FFN block in every so many; 0: none
    trace: Path | None = None
    verify_weights: bool = False  # compare them with their hashes when they are loaded
    cache: Path = field(default_factory=default_cache)
    cache_limit: CacheLimit = field(default_factory=CacheLimit)
    links_cache: Path | None = None  # where measured links are remembered; None: measure them every time

    @classmethod
    def from_flags(cls, flags: dict[str, Any]) -> "Placement":
        """Take the placement flags out of `flags`, resolving `TPI_WORKERS` and sizes.

        Raises:
            UsageError: if both --local and --workers are given, or an address or size is malformed.
        """
        workers = _addresses(flags.pop("workers"))
        local = flags.pop("local")
        if workers and local:
            raise UsageError("--local and --workers exclude each other; give one of them")
        if not workers and not local:
            workers = _addresses((os.environ.get("TPI_WORKERS", ""),))
        if flags["retain"] and not flags["window"]:
            raise UsageError("--retain goes with --window; without them the scheduler keeps what the memory allows")
        memory, cache = flags.pop("memory"), flags.pop("cache") or default_cache()
        emulated = "TPI_TESTBED" in os.environ  # all testbeds use the same addresses
        return cls(
            model=flags.pop("model"),
            local=local or 0,
            workers=workers,
            memory=None if memory is None else parse_size(memory),
            cache=cache,
            links_cache=None if emulated else cache / "links.json",
            **{name: flags.pop(name) for name in _PLAIN},
        )


def placement_options(command: Command) -> Command:
    """Flags that say which model runs where."""
    for option in reversed(_PLACEMENT):
        command = option(command)
    return command


def sampling_options(command: Command) -> Command:
    """Flags that say how tokens are drawn."""
    for option in reversed(_SAMPLING):
        command = option(command)
    return command


def take_sampling(flags: dict[str, Any]) -> Sampling:
    """Take the sampling flags out of `flags`."""
    names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed")
    return Sampling(**{name: flags.pop(name) for name in names})


def _addresses(texts: Sequence[str]) -> tuple[str, ...]:
    """`HOST:PORT` addresses from comma-separated texts."""
    found = tuple(part.strip() for text in texts for part in text.split(",") if part.strip())
    for address in found:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UsageError(f"worker address {address!r} is not HOST:PORT; write for example 192.168.1.7:9990")
    if len(set(found)) != len(found):
        raise UsageError("a worker address is given twice; give each worker once")
    return found


_PLAIN = (
    "split", "dtype", "context", "threads", "kv_dtype", "collective", "wire", "scheduler", "window", "retain", "trace",
    "verify_weights", "cache_limit",
)  # fmt: skip

_PLACEMENT = (
    click.option("-m", "--model", required=True, help="Alias, Hugging Face directory, .gguf file, pack, or hub id."),
    click.option("--local", type=click.IntRange(min=1), help="Start N worker processes on this machine."),
    click.option("--workers", multiple=True, metavar="HOST:PORT,...", help="Workers to use; else TPI_WORKERS."),
    click.option("--split", metavar="3,2,1", help="Share of each node, master first; 0 gives a node nothing."),
    click.option("--dtype", default="auto", show_default=True, help="auto, f32, bf16, q8, q4 or q4s."),
    click.option("-c", "--context", type=click.IntRange(min=1), help="Tokens of context; default up to 4096."),
    click.option("--memory", metavar="SIZE", help="Bytes each node may use above its bare process, e.g. 4GiB."),
    click.option("-t", "--threads", type=click.IntRange(min=1), help="Compute threads per node."),
    click.option(
        "--kv-dtype", type=click.Choice(["f32", "f16", "q8"]), help="Keys and values; f32 for f32 weights, else f16."
    ),
    click.option(
        "--collective",
        metavar="NAME",
        help="How partial sums are added up (default: in shared memory with --local, else chosen by measuring).",
    ),
    click.option("--wire", type=click.Choice(wire_names()), help="Format of partial sums on the network."),
    click.option(
        "--window", default=0, type=click.IntRange(min=0), help="Blocks in memory at once; 0: as memory allows."
    ),
    click.option(
        "--retain", default=0, type=click.IntRange(min=0), help="With --window: keep one FFN block in every N."
    ),
    click.option(
        "--scheduler/--no-scheduler", default=True, help="Stream weights that do not fit; off: load them all."
    ),
    click.option(
        "--trace", type=click.Path(path_type=Path, dir_okay=False), help="Write a timeline (Chrome trace JSON)."
    ),
    click.option(
        "--verify-weights", is_flag=True, help="Compare all weights with their hashes as they are loaded; takes longer."
    ),
    click.option("--cache", type=click.Path(path_type=Path), help="Directory for packs and shards."),
    cache_limit_option,
)

_SAMPLING = (
    click.option("--temp", "temperature", default=0.8, show_default=True, help="Temperature; 0 is greedy."),
    click.option("--top-k", default=40, show_default=True, help="Keep the k best tokens; 0: all."),
    click.option("--top-p", default=0.95, show_default=True, help="Keep the best tokens up to this probability."),
    click.option("--min-p", default=0.05, show_default=True, help="Drop tokens below this share of the best one."),
    click.option("--repeat-penalty", default=1.0, show_default=True, help="Above 1: discourage repetition."),
    click.option("--seed", type=int, help="Draw the same tokens again."),
)

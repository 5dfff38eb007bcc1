"""The command line's flags, gathered into frozen dataclasses before anything is constructed."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import click

from master.vocabulary.sampler import RANDOM_SEED, Sampling
from tpi import progress
from tpi.cachelimit import CacheLimit, cache_limit_option
from tpi.config import default_cache, parse_size
from tpi.devices.options import DeviceOptions, device_options
from tpi.errors import UsageError
from tpi.flags import FiniteRange
from tpi.kernels.kv import KV_DTYPES, KvDtype
from tpi.net.fields import UsualRequest
from tpi.net.wire import wire_names
from tpi.paths import DIRECTORY, FILE

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_CONTEXT = 4096
NO_WORKERS = "none"  # value of --workers for a run without workers
Sparsity = Literal["auto", "off", "static", "dynamic"]
SPARSITIES: tuple[Sparsity, ...] = ("auto", "off", "static", "dynamic")
_MOST_CONTEXT = 1 << 24  # upper bound of --context in tokens; no model was made for more
_MOST_THREADS = 1024


@dataclass(frozen=True)
class RunOptions:
    """The model to run, on which nodes, and within which limits. Sizes are in bytes. None means an automatic choice."""

    model: str
    local: int = 0
    workers: tuple[str, ...] = ()
    keep_workers: bool = False  # use all `workers`, even those that make a token slower
    discover: bool = False  # use the paired workers that are found, if none are named
    busy_workers: tuple[str, ...] = ()  # paired workers that serve another master now and may join when they are free
    split: str | None = None
    stages: str = "auto"
    dtype: str = "auto"
    draft: str | None = None  # name of a small model on the master that drafts tokens
    draft_memory: int = 0  # bytes of the master's memory that the draft model takes; determined when it is loaded
    context: int | None = None
    # number of requests to plan memory for, if there is enough; each has a full context, or the lengths of `usual`
    parallel: int = 1
    streams: int = 1  # number of concurrent answers for which stages are chosen
    batched: int = 0  # limit of requests at once if accelerators batch requests; 0: `parallel`
    # the requests' mean lengths, if all requests are known before the model is loaded
    usual: UsualRequest | None = None
    memory: int | None = None
    local_memory: int = 0  # bytes of each node of this machine if `memory` is None; determined before the nodes start
    threads: int | None = None
    kv_dtype: KvDtype | None = None
    collective: str | None = None
    wire: str | None = None
    scheduler: bool = True  # off: all weights are resident, whatever --memory says
    window: int = 0  # blocks in memory at once, as in the TPI-LLM paper; 0: the fastest that fits
    sparsity: Sparsity = "auto"  # whether to compute only active neurons
    retain: int = 0  # with `window`: one in `retain` FFN blocks is resident; 0: no FFN block
    trace: Path | None = None
    verify_weights: bool = False  # compare weights with their hashes when they are loaded
    devices: DeviceOptions = field(default_factory=DeviceOptions)  # devices of each node on this machine
    other_devices: tuple[DeviceOptions, ...] = ()  # devices of each local worker, if they are not `devices`
    patience: float = 60.0  # seconds to wait for workers if the model does not fit without them
    rebalance: bool = False  # use workers that join at once; False: from the next request on
    keys: bool = True  # encrypt connections to other machines, and accept only known keys
    cache: Path = field(default_factory=default_cache)
    cache_limit: CacheLimit = field(default_factory=CacheLimit)
    links_cache: Path | None = None  # file in which measured links are stored; None: measure the links at each start

    @classmethod
    def from_flags(cls, flags: dict[str, Any]) -> "RunOptions":
        """Take the placement flags out of `flags`, resolving `TPI_WORKERS` and sizes.

        Raises:
            UsageError: if both --local and --workers are given, or one of them with flags that make each card a node;
                if an address or size is malformed; or if the trace cannot be written.
        """
        named = flags.pop("workers")
        workers = worker_addresses(() if named == (NO_WORKERS,) else named)
        local = flags.pop("local")
        if workers and local:
            raise UsageError("--local and --workers exclude each other; give one of them")
        if not named and not local:
            workers = worker_addresses((os.environ.get("TPI_WORKERS", ""),))
        if flags["retain"] and not flags["window"]:
            raise UsageError("--retain has no effect without --window; add --window, or leave --retain out")
        if flags["split"] == "auto":
            flags["split"] = None
        memory, cache = _memory(flags.pop("memory")), flags.pop("cache") or default_cache()
        devices, *others = _by_node(DeviceOptions.from_flags(flags), flags["sparsity"], named, local)
        if flags["trace"] is not None:
            _try_writing(flags["trace"])
        return cls(
            model=flags.pop("model"),
            local=local or len(others),
            workers=() if others else workers,
            keep_workers=bool(named),
            discover=not (workers or named or local or others),
            memory=memory,
            cache=cache,
            devices=devices,
            other_devices=tuple(others),
            links_cache=links_file(cache),
            **{name: flags.pop(name) for name in _PLAIN},
        )


def _by_node(
    devices: DeviceOptions, sparsity: Sparsity, named: Sequence[str], local: int | None
) -> list[DeviceOptions]:
    """Return the devices of each node on this machine: one card each where a node computes with one card alone.

    Args:
        devices: what the user asked for.
        sparsity: the value of --sparsity.
        named: the values of --workers.
        local: the value of --local.

    Raises:
        UsageError: if --workers or --local contradict one node for each card.
    """
    pipeline = devices.offload.pipeline
    apart = pipeline in ("batch", "demand") or sparsity in ("static", "dynamic")
    if len(devices.devices) == 1 or not apart:
        return [devices]
    flag = f"--pipeline {pipeline}" if pipeline in ("batch", "demand") else f"--sparsity {sparsity}"
    count = len(devices.devices)
    if named not in ((), (NO_WORKERS,)):
        raise UsageError(
            f"with {flag}, each card is a node of its own; give --device once here, start tpi worker --device NAME for "
            "each other card, and add its address to --workers"
        )
    if local not in (None, count - 1):
        raise UsageError(f"with {flag}, the {count} cards are {count} nodes; leave --local out")
    return list(devices.apart)


def links_file(cache: Path) -> Path | None:
    """Return the file in which measured links are stored; None in testbeds, which all have the same addresses."""
    return None if "TPI_TESTBED" in os.environ else cache / "links.json"


def placement_options(command: Command) -> Command:
    """Add the flags for the model, its nodes and their limits to `command`."""
    for option in reversed(_PLACEMENT):
        command = option(command)
    return device_options(command)


def sampling_options(command: Command) -> Command:
    """Add the flags for sampling to `command`."""
    for option in reversed(_SAMPLING):
        command = option(command)
    return command


def take_sampling(flags: dict[str, Any]) -> Sampling:
    """Take the sampling flags out of `flags`; the model's own settings replace flags that were not given."""
    names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
    return Sampling.of({name: flags.pop(name) for name in names}, seed=flags.pop("seed"))


def quiet_option(command: Command) -> Command:
    """Add `--quiet`, which also hides progress."""

    def hush(context: click.Context, parameter: click.Parameter, quiet: bool) -> bool:
        progress.show(not quiet)
        return quiet

    option = click.option("-q", "--quiet", is_flag=True, callback=hush, help="Print only answers, warnings and errors.")
    return option(command)


verbose_option = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Print the table of nodes even if there is only one, and the layouts from which the stages were chosen.",
)


def _memory(text: str | None) -> int | None:
    if text is None:
        return None
    size = parse_size(text, "--memory")
    if size == 0:
        raise UsageError("--memory 0 leaves a node nothing to work with; give for example 600MiB or 4GiB")
    return size


def _try_writing(path: Path) -> None:
    """Check that the trace can be written, before the run and not at its end.

    A file that this check creates is removed again, so that a failed run leaves no file. A FIFO or a device is not
    tried, because its reader would see the trial as the trace.
    """
    if path.is_fifo() or path.is_char_device():
        return
    try:
        with path.open("ab" if path.exists() else "xb") as file:
            if file.mode == "xb":
                path.unlink()
    except OSError as error:
        raise UsageError(f"cannot write the trace to {path}: {error.strerror}; give another --trace") from error


def worker_addresses(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the `HOST:PORT` addresses in comma-separated texts.

    Raises:
        UsageError: if an address is malformed, or given twice.
    """
    found = tuple(part.strip() for text in texts for part in text.split(",") if part.strip())
    for address in found:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UsageError(f"worker address {address!r} is not HOST:PORT; write for example 192.168.1.7:9990")
    if twice := next((address for address in found if found.count(address) > 1), None):
        raise UsageError(f"the worker address {twice} is given twice; give each worker once")
    return found


_PLAIN = (
    "split", "stages", "dtype", "draft", "context", "threads", "kv_dtype", "collective", "wire", "scheduler", "window",
    "retain", "trace", "sparsity", "verify_weights", "keys", "patience", "rebalance", "cache_limit",
)  # fmt: skip

_PLACEMENT = (
    click.option("-m", "--model", help="Alias, Hugging Face directory, .gguf file, pack, or hub id."),
    click.option(
        "--local", type=click.IntRange(min=1), help="Start N worker processes on this machine (default: none)."
    ),
    click.option(
        "--workers",
        multiple=True,
        metavar="HOST:PORT,...|none",
        help="Workers to use (default: TPI_WORKERS, else the paired workers that are found).",
    ),
    click.option(
        "--split",
        metavar="3,2,1",
        help="Share of each node, master first; equal; or auto, the default: the fastest shares, equal on one machine.",
    ),
    click.option(
        "--stages",
        default="auto",
        show_default=True,
        metavar="auto|N|LAYOUT",
        help="Groups of nodes that hold different layers: auto (the fastest), their number, or the layers and nodes of "
        "each, such as 0-9:master,10-21:desk+attic.",
    ),
    click.option(
        "--dtype", default="auto", show_default=True, help="Format of the weights: auto, f32, bf16, q8, q4 or q4s."
    ),
    click.option(
        "--draft",
        metavar="MODEL",
        help="Small model with the same tokenizer that drafts tokens on this machine, in q4.",
    ),
    click.option(
        "-c",
        "--context",
        type=click.IntRange(1, _MOST_CONTEXT),
        help="Tokens of context, up to what the model was made for (default: that, at most 4096 or what memory holds).",
    ),
    click.option(
        "--memory",
        metavar="SIZE",
        help="Memory that each node may use besides its bare process, e.g. 4GiB (default: the free memory).",
    ),
    click.option(
        "-t", "--threads", type=click.IntRange(1, _MOST_THREADS), help="Compute threads per node (default: all cores)."
    ),
    click.option(
        "--kv-dtype",
        type=click.Choice(KV_DTYPES),
        help="Format of keys and values (default: f32 for f32 weights, else f16); q8 and q4 take less memory.",
    ),
    click.option(
        "--collective",
        metavar="NAME",
        help="Algorithm of the allreduce (default: in shared memory with --local, else chosen by measuring).",
    ),
    click.option(
        "--wire",
        type=click.Choice(wire_names()),
        help="Format of partial results on the network (default: f32 for f32 weights and in shared memory, else bf16).",
    ),
    click.option(
        "--window",
        default=0,
        show_default=True,
        type=click.IntRange(min=0),
        help="Blocks in memory at once; 0: as memory allows.",
    ),
    click.option(
        "--retain",
        default=0,
        show_default=True,
        type=click.IntRange(min=0),
        help="With --window: one FFN block in every N is resident; 0: none.",
    ),
    click.option(
        "--scheduler/--no-scheduler",
        default=True,
        show_default=True,
        help="Stream weights that do not fit; off: load them all.",
    ),
    click.option(
        "--sparsity",
        type=click.Choice(SPARSITIES),
        default="auto",
        show_default=True,
        help="Compute only active neurons, as tpi profile finds them. auto: if faster; off: never; static: always; "
        "dynamic: always, and move them to where they are faster.",
    ),
    click.option("--trace", type=FILE, help="Write a timeline (Chrome trace JSON)."),
    click.option(
        "--verify-weights", is_flag=True, help="Compare all weights with their hashes at loading, which takes longer."
    ),
    click.option(
        "--patience",
        metavar="SECONDS",
        default=60.0,
        show_default=True,
        type=FiniteRange(min=0),
        help="How long to wait for lost workers if the model does not fit without them.",
    ),
    click.option(
        "--rebalance", is_flag=True, help="Use a worker that joins at once, and not only from the next request on."
    ),
    click.option(
        "--keys/--no-keys",
        default=True,
        show_default=True,
        help="Require keys of workers on other machines; off is safe only if a VPN protects the network.",
    ),
    click.option("--cache", type=DIRECTORY, help="Directory for packs and shards (default: ~/.cache/tpi)."),
    cache_limit_option,
)

_SAMPLING = (
    click.option(
        "--temp",
        "temperature",
        type=float,
        help="Temperature, 0 to 100; 0: greedy; above 1: more random (default: the model's, else 0.8).",
    ),
    click.option("--top-k", type=int, help="Keep the k best tokens; 0: all (default: the model's, else 40)."),
    click.option(
        "--top-p",
        type=float,
        help="Keep the best tokens up to this probability, above 0 to 1; 1: all (default: the model's, else 0.95).",
    ),
    click.option(
        "--min-p",
        type=float,
        help="Drop tokens below this share of the best one, 0 to 1; 0: none (default: the model's, else 0.05).",
    ),
    click.option(
        "--repeat-penalty",
        type=float,
        help="Above 1: discourage repetition; 0.01 to 100; 1: off (default: the model's, else 1).",
    ),
    click.option(
        "--seed",
        default=RANDOM_SEED,
        show_default=True,
        type=int,
        help="Seed of the sampler: the same seed draws the same tokens; -1: other tokens each time.",
    ),
)

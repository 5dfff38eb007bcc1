"""The Llama-2-70B shape on eight nodes of this machine with 500 MiB each.

All layers are one random layer in 4 bits: a pack stores equal blocks once, so it takes 1 GB of disk. At run time each
layer is a block of its own. Weights that do not fit into memory are read from disk again for every layer of every
token.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.result import Check, Result, Row, Table
from benchmarks.support.machine import MIB
from tests.support.weights.shapes import LLAMA_1B, tensor_files, write_byte_tokenizer
from tpi.config import default_cache
from tpi.families.huggingface.reader import from_huggingface
from tpi.pack.builder import tokens
from tpi.pack.builder.build import OpenedSource, pack_model
from tpi.sources.base import Bytes, SourceTensor
from tpi.sources.elements import Element

SHAPE: dict[str, object] = LLAMA_1B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
NODES, BUDGET, LIMIT = 8, 500, 600  # MiB: given to each node, and what a worker may have resident at its peak
PAPER = {(2, 2): 3.7, (2, 4): 3.3, (2, 6): 3.3, (2, 8): 3.1, (4, 2): 4.5, (4, 4): 3.1, (4, 6): 3.1, (4, 8): 3.1}
_F32, _Q4_1, _Q8_0 = Element("F32", 1, 4), Element("Q4_1", 32, 20), Element("Q8_0", 32, 34)
NOTES = f"""
Llama-2-70B: 8192 hidden, 28672 FFN, 80 layers, 64/8 heads, 32000 tokens, random weights in q4 (tables in q8), context
64. {NODES} processes on this machine (a master and {NODES - 1} workers) share two cores and one disk, each with
`--memory {BUDGET}MiB`. Each token streams the weights that do not fit into the memory of all processes, so the disk
determines its time. The second table is one token for each number of devices, with the paper's windows of 2 and 4
blocks in place of a budget. For comparison it has the paper's figure, which is for f32 weights and the paper's own
process, and the memory that the weights alone take without a scheduler. MiB.
"""


class RandomSource:
    """Random weights of a Llama shape, made when they are read: matrices as Q4_1, tables as Q8_0, vectors of ones."""

    label = "random weights"

    def __init__(self, shape: Mapping[str, object]) -> None:
        sizes = {name: size for file in tensor_files(dict(shape)).values() for name, size in file.items()}
        self.tensors: Mapping[str, SourceTensor] = {
            name: SourceTensor(name, size, _element(size, shape["vocab_size"]), Path(name), 0)
            for name, size in sizes.items()
        }

    def read(self, tensor: SourceTensor, rows: tuple[int, int], columns: tuple[int, int]) -> Bytes:
        """Return random data for a tensor, in the format of its kind."""
        element, count = tensor.element, rows[1] - rows[0]
        groups = (columns[1] - columns[0]) // element.group
        if element is _F32:
            ones: Bytes = np.ones((count, groups), np.float32).view(np.uint8)
            return ones
        random = np.random.default_rng([len(tensor.name), *tensor.name.encode(), *rows, *columns])
        blocks = random.integers(0, 256, (count, groups, element.group_bytes), np.uint8)
        blocks[..., :4] = _factors(element, tensor.columns, blocks[..., :4])
        found: Bytes = blocks.reshape(count, -1)
        return found

    def close(self) -> None:
        """Do nothing: no file is open."""


def _element(size: tuple[int, ...], vocabulary: object) -> Element:
    if len(size) == 1:
        return _F32
    return _Q8_0 if size[0] == vocabulary else _Q4_1


def _factors(element: Element, inputs: int, random: Bytes) -> Bytes:
    """Return the first four bytes of a group: a scale that gives rows the length 1, and for Q4_1 the minimum."""
    wanted = inputs**-0.5 / (4.6 if element is _Q4_1 else 74.0)  # the deviation of the codes 0..15, and -128..127
    scale = np.float16(wanted)
    if element is _Q4_1:
        both: Bytes = np.array([scale, np.float16(-7.5 * scale)]).view(np.uint8)
        return both
    found: Bytes = random.copy()
    found[..., :2] = np.array([scale]).view(np.uint8)
    return found


def pack_seventy(target: Path) -> Path:
    """Write the pack, unless it exists."""
    layer = SHAPE | {"num_hidden_layers": 1}
    source = RandomSource(layer)
    model = from_huggingface(layer, source.tensors.__contains__, source.label)
    layers = int(str(SHAPE["num_hidden_layers"]))
    model = replace(model, config=replace(model.config, layers=layers), layers=model.layers * layers)
    with TemporaryDirectory() as folder:
        write_byte_tokenizer(Path(folder))
        opened = OpenedSource(
            target.name, model, source, lambda out: tokens.from_directory(Path(folder), SHAPE, model.config.vocab, out)
        )
        pack_model(opened, "auto", target)
    return target


def bench(quick: bool) -> Result:
    """Generate three tokens on eight nodes, then one token for each number of devices and window."""
    pack = pack_seventy(default_cache() / "benchmarks" / "llama-70b-q4")
    disk = sum(file.stat().st_size for file in pack.iterdir()) / MIB
    fields = run(pack, NODES, 1 if quick else 3, "--memory", f"{BUDGET}MiB")
    workers = [node["peak_rss_bytes"] / MIB for node in fields["nodes"][1:]]
    above = max((node["peak_rss_bytes"] - node["bare_rss_bytes"]) / MIB for node in fields["nodes"])
    checks = [
        Check("largest peak RSS of a worker, MiB", max(workers), LIMIT, at_most=True),
        Check("most memory of any node above its bare process, times --memory", above / BUDGET, 1.0, at_most=True),
        Check("tokens generated", fields["completion_tokens"], 1 if quick else 3, within=0),
        Check("pack on disk, MiB", disk, 1200, at_most=True),
    ]
    main = Table(f"{fields['completion_tokens']} tokens on {NODES} nodes", list(_nodes(fields)))
    sizes = [] if quick else [_windows(pack, window, nodes) for window in (2, 4) for nodes in (2, 4, 6, 8)]
    notes = f"{NOTES}First token after {fields['ttft_s']:.0f} s, then {_seconds_per_token(fields):.0f} s per token.\n"
    tables = [main, *([Table("Peak memory by devices and window", sizes)] if sizes else [])]
    return Result("70B on eight nodes of 500 MiB", notes, tables, checks)


def run(pack: Path, nodes: int, generate: int, *flags: str) -> dict[str, Any]:
    """Run `tpi run --json` on `nodes` nodes of this machine."""
    command = [sys.executable, "-m", "tpi.cli", "run", "-m", str(pack), "--local", str(nodes - 1), "-c", "64"]
    prompt = ["--raw", "-p", "hello", "-n", str(generate), "--temp", "0", "--json"]
    done = subprocess.run([*command, *prompt, *flags], stdout=subprocess.PIPE, check=True)
    fields: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return fields


def _nodes(fields: Mapping[str, Any]) -> Iterator[Row]:
    for node in fields["nodes"]:
        yield {
            "node": node["name"],
            "weights": round(node["weight_bytes"] / MIB),
            "bare": round(node["bare_rss_bytes"] / MIB),
            "planned above": round(node["planned_bytes"] / MIB),
            "peak RSS": round(node["peak_rss_bytes"] / MIB),
            "streamed/token": round(node["streamed_bytes_per_token"] / MIB),
            "disk MB/s": round(node["disk_mb_per_s"]),
            "stall s/token": node["io_stall_ms_per_token"] / 1e3,
        }


def _windows(pack: Path, window: int, nodes: int) -> Row:
    fields = run(pack, nodes, 1, "--window", str(window))
    master, *workers = fields["nodes"]
    largest = max(workers, key=lambda node: int(node["peak_rss_bytes"]))
    row: dict[str, str | int | float] = {"window": window, "devices": nodes}
    for name, node in (("master", master), ("worker", largest)):
        predicted = (node["bare_rss_bytes"] + node["planned_bytes"]) / MIB
        row |= {f"{name} predicted": round(predicted), f"{name} peak": round(node["peak_rss_bytes"] / MIB)}
    return row | {
        "weights of a worker": round(largest["weight_bytes"] / MIB),
        "paper, GB": PAPER[window, nodes],
    }


def _seconds_per_token(fields: Mapping[str, Any]) -> float:
    rate = float(fields["decode_tokens_per_s"])
    return 1 / rate if rate else 0.0


if __name__ == "__main__":
    print(pack_seventy(Path(sys.argv[1])))

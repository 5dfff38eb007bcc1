"""The baseline of the TPI-LLM paper's figure 6: model parallelism. Each device computes some layers with all heads.

One process per device (`python -m benchmarks.network.layerwise TASK`), TPI's blocks and kernels, hidden states over
plain TCP from each device to the next. Only one device at a time computes a token, so more devices add memory, not
speed.
"""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from benchmarks.network.tcp_star import F32, prepared, receive
from master.deployment.deploy import kv_dtype
from testbed.launch import Testbed
from tests.support.segments import compute
from tpi.block import residual
from tpi.config import default_cache
from tpi.devices.host import HostDevice, open_host
from tpi.kernels import Kernels
from tpi.kernels.kv import KvPages, pages_for
from tpi.kernels.spec import Batch, NormSpec
from tpi.pack.library.locate import open_model
from tpi.pack.reader import Pack, PackBlock
from tpi.partition import Range, deal
from worker.node.segment import Segment, open_segment

PORT = 9991  # port of a device that has a network namespace of its own


@dataclass(frozen=True)
class Task:
    """The settings of one device: the model, its format, the device's rank, all hosts, and the number of tokens."""

    model: str
    dtype: str
    rank: int
    hosts: tuple[str, ...]
    tokens: int


def measure(bed: Testbed, model: str, dtype: str, tokens: int) -> float:
    """Return the median seconds per token over the devices of `bed`, from `tokens` tokens."""
    names = [device.name for device in bed.topology.devices]
    hosts = tuple(bed.address(name) for name in names)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        stages = []
        for rank, name in enumerate(names):
            task = json.dumps(asdict(Task(model, dtype, rank, hosts, tokens)))
            command = [sys.executable, "-m", "benchmarks.network.layerwise", task]
            stage = stack.enter_context(bed.popen(name, command, **pipes))
            stack.callback(stage.kill)
            stages.append(stage)
        for stage in stages:
            _expect(stage)
        for stage in stages:
            _say(stage)
        return float(json.loads(_expect(stages[0])))


def _say(stage: "subprocess.Popen[str]") -> None:
    assert stage.stdin is not None
    stage.stdin.write("connect\n")
    stage.stdin.flush()


def _expect(stage: "subprocess.Popen[str]") -> str:
    assert stage.stdout is not None
    if line := stage.stdout.readline():
        return line
    raise RuntimeError(f"a stage ended early, with exit code {stage.wait()}")


# ---- one device ----


class Layers:
    """Contiguous layers of a pack, whole and in memory."""

    def __init__(self, pack: Pack, layers: Range, tokens: int, kernels: Kernels) -> None:
        self.kernels = kernels
        config, count = pack.config, pages_for(tokens)
        self._tables = np.arange(count, dtype=np.int32)[None]
        # earlier layers store nothing, and these are few, so they keep their numbers
        kv = KvPages.allocate(range(layers.last), count, config.kv_heads, config.head_dim, kv_dtype(pack))
        halves = [(layer, half) for layer in range(layers.first, layers.last) for half in pack.layers[layer]]
        self._blocks = [
            (_whole(pack, layer, half, kv, self.kernels), residual(config, half.kind, half.vectors()), _bytes(half))
            for layer, half in halves
        ]

    def __call__(self, x: F32, position: int) -> F32:
        """Compute one token's hidden state `[1, hidden]` at `position` after these layers."""
        batch = Batch(np.array([position], np.int32), np.zeros(1, np.int32), self._tables)
        for segment, after, data in self._blocks:
            x = self.kernels.add_residual(after, x, compute(segment, data, x, batch))
        return x


def _bytes(block: PackBlock) -> Any:
    return np.concatenate([block.read_units(run.name, 0, run.units).reshape(-1) for run in block.shape.runs])


def _whole(pack: Pack, layer: int, block: PackBlock, pages: KvPages, kernels: Kernels) -> Segment:
    runs = [(run, Range(0, run.units)) for run in block.shape.runs]
    return open_segment(HostDevice(kernels), pack.config, layer, runs, block.vectors(), pages)


def _hidden(pack: Pack, link: socket.socket) -> F32:
    x = np.empty((1, pack.config.hidden), np.float32)
    receive(link, x.data.cast("B"))
    return x


def _follow(task: Task, pack: Pack, layers: Layers, before: socket.socket, after: socket.socket) -> None:
    for position in range(task.tokens):
        after.sendall(layers(_hidden(pack, before), position).data.cast("B"))


def _lead(task: Task, pack: Pack, layers: Layers, before: socket.socket, after: socket.socket) -> Iterator[float]:
    """Yield the seconds of each token on the first device, embedding and head included."""
    embedding, head = pack.embedding, pack.head
    tables = [(table.run("row"), _bytes(table)) for table in (embedding, head)]
    norm, token = NormSpec("rms", pack.config.norm_eps, pack.final.vectors()["norm"]), 1
    kernels = layers.kernels
    for position in range(task.tokens):
        started = time.perf_counter()
        x = layers(kernels.gather(*tables[0], np.array([token], np.int32)), position)
        if len(task.hosts) > 1:
            after.sendall(x.data.cast("B"))
            x = _hidden(pack, before)
        token = int(kernels.logits(*tables[1], kernels.norm(norm, x)).argmax())
        yield time.perf_counter() - started


def main() -> None:
    """Listen, load and print a line; after a line on stdin connect to the next device and pass tokens on.

    The first device prints the seconds of a token.
    """
    fields = json.loads(sys.argv[1])
    task = Task(**{**fields, "hosts": tuple(fields["hosts"])})
    kernels = open_host().kernels
    kernels.set_threads(1)
    pack, size = open_model(task.model, task.dtype, default_cache()), len(task.hosts)
    with socket.create_server((task.hosts[task.rank], PORT)) as listener:
        layers = Layers(pack, deal(pack.config.layers, [1.0] * size)[task.rank], task.tokens, kernels)
        print("ready", flush=True)
        sys.stdin.readline()
        after = prepared(socket.create_connection((task.hosts[(task.rank + 1) % size], PORT)))
        with after, prepared(listener.accept()[0]) as before:
            if task.rank:
                _follow(task, pack, layers, before, after)
            else:
                print(json.dumps(median(_lead(task, pack, layers, before, after))), flush=True)
            sys.stdin.readline()


if __name__ == "__main__":
    main()

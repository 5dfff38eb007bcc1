"""A made-up model for tests of the control and weights planes: blocks of random units, without a pack."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.support.paths import ROOT
from tpi.config import ModelConfig
from tpi.errors import WeightsError
from tpi.net.messages import (
    Assign,
    BlockPlan,
    LayerPlan,
    NodeOptions,
    PeerAddress,
    RunPlan,
    StagePlan,
    Step,
    StepEntry,
    VectorPlan,
)
from tpi.net.transfers import Need  # fmt: skip
from tpi.pack.layout import BlockKind, Part, RunLayout
from tpi.partition import Range

REAL_WORKER = (sys.executable, "-m", "worker.commands")
FAKE_WORKER = (sys.executable, "-m", "tests.support.processes.fake_worker")
HIDDEN = 32


def config(layers: int) -> ModelConfig:
    return ModelConfig(
        family="test", hidden=HIDDEN, layers=layers, heads=8, kv_heads=4, head_dim=4, intermediate=64, vocab=64,
        context=128, norm="rms", norm_eps=1e-5, activation="silu", gated=True, inv_freq=(1.0, 0.5),
        attention_scale=0.5,
    )  # fmt: skip


class MadeUpModel:
    """A model of `layers` attention and FFN blocks of random bytes; a source for `Cluster.assign`."""

    def __init__(self, layers: int = 2, width: int = 4, units: int = 8, same: bool = False, seed: int = 0) -> None:
        parts = (Part("q", "f32", "row"), Part("o", "f32", "column"))
        self.layouts = (
            RunLayout("query", "record", parts, width, HIDDEN, units),
            RunLayout("kv", "record", parts, width, HIDDEN, units // 2),
            RunLayout("neuron", "record", parts, width, HIDDEN, 2 * units),
        )
        self.layers = layers
        self.reads: list[Need] = []
        self.units: dict[tuple[bytes, str], npt.NDArray[np.uint8]] = {}
        self.ids: list[bytes] = []
        rng = np.random.default_rng(seed)
        for index in range(2 * layers):
            identity = sha256(f"{seed} {index % 2 if same else index}".encode()).digest()
            self.ids.append(identity)
            for layout in self.layouts[:2] if index % 2 == 0 else self.layouts[2:]:
                data = rng.integers(0, 256, (layout.units, layout.unit_bytes), np.uint8)
                self.units.setdefault((identity, layout.name), data)
            vector = rng.standard_normal(HIDDEN).astype(np.float32)
            self.units.setdefault((identity, "vectors"), vector.view(np.uint8)[None])

    def read(self, need: Need) -> memoryview:
        self.reads.append(need)
        found = self.units.get((need.block, need.run))
        if found is None:
            raise WeightsError("no such block")
        return np.ascontiguousarray(found[need.first : need.last]).data.cast("B")

    def assign(
        self, session: int, epoch: int, peers: Sequence[PeerAddress], rank: int, query: Range, kv: Range, ffn: Range
    ) -> Assign:
        ranges = {"query": (0, query), "kv": (1, kv), "neuron": (2, ffn)}
        blocks = {identity: self._block(identity, ranges) for identity in self.ids}
        index = {identity: number for number, identity in enumerate(blocks)}
        layers = tuple(
            LayerPlan(layer, (index[self.ids[2 * layer]], index[self.ids[2 * layer + 1]]))
            for layer in range(self.layers)
        )
        stages = (StagePlan(0, self.layers, tuple(range(len(peers)))),)
        options = NodeOptions(context=64, pages=4, kv_dtype="f32", prefill_tokens=32, scheduler="window")
        return Assign(
            session, epoch, rank, len(peers), config(self.layers), self.layouts, tuple(blocks.values()), layers,
            stages, tuple(peers), "star", "f32", options,
        )  # fmt: skip

    def split(self, session: int, epoch: int, peers: Sequence[PeerAddress], cut: int = 4) -> list[Assign]:
        """Return plans with units below `cut` on rank 1, the rest on rank 2 (if it exists), and none on the master."""
        units = self.layouts[0].units
        ranges = [Range(0, 0), Range(0, cut), Range(cut, units)][: len(peers)]
        halves = [Range(part.first // 2, -(-part.last // 2)) for part in ranges]
        doubled = [Range(2 * part.first, 2 * part.last) for part in ranges]
        return [
            self.assign(session, epoch, peers, rank, *parts)
            for rank, parts in enumerate(zip(ranges, halves, doubled, strict=True))
        ]

    def _block(self, identity: bytes, ranges: dict[str, tuple[int, Range]]) -> BlockPlan:
        runs = []
        for name, (layout, part) in ranges.items():
            data = self.units.get((identity, name))
            if data is not None:
                hashes = b"".join(sha256(data[unit].data).digest() for unit in range(part.first, part.last))
                runs.append(RunPlan(layout, part.first, part.last, hashes))
        vectors_hash = sha256(self.units[identity, "vectors"].data).digest()
        kind: BlockKind = "attention" if len(runs) == 2 else "ffn"
        return BlockPlan(identity, kind, tuple(runs), (VectorPlan("norm", HIDDEN),), vectors_hash)


def step(session: int, epoch: int, number: int, value: float = 1.0, tokens: int = 1) -> Step:
    entry = StepEntry(7, number, tokens, min(number, 1), (0,) if number == 0 else ())
    return Step(session, epoch, number, (entry,), (), np.full((tokens, HIDDEN), value, np.float32))


@contextmanager
def fake_worker(cache: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a worker process that computes nothing; return its process and address."""
    with fake_workers([cache], *arguments) as (processes, addresses):
        yield processes[0], addresses[0]


@contextmanager
def real_worker(cache: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a worker process that computes; return its process and address."""
    command = [*REAL_WORKER, "--listen", "127.0.0.1:0", "--cache", str(cache), *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            yield process, announced(process)
        finally:
            process.kill()


@contextmanager
def fake_workers(caches: Sequence[Path], *arguments: str) -> Iterator[tuple[list[subprocess.Popen[bytes]], list[str]]]:
    """Run several fake workers during the block, named like their caches by default."""
    processes = [
        subprocess.Popen(
            [*FAKE_WORKER, "--listen", "127.0.0.1:0", "--cache", str(cache), "--name", cache.name, *arguments],
            cwd=ROOT, stdout=subprocess.PIPE,
        )
        for cache in caches
    ]  # fmt: skip
    try:
        yield processes, [announced(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def announced(process: subprocess.Popen[bytes]) -> str:
    """Return the address on which a worker process says that it listens."""
    assert process.stdout
    return process.stdout.readline().decode().split("listens on ")[1].split()[0]

"""A node with an emulated accelerator that decodes a batch, step by step, in the time of the emulated machine.

The pages count as full without a computed prompt. They hold zeros, which take as long to attend to as other values.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from master.deployment.assignments import assignments
from master.deployment.deploy import kv_dtype
from master.deployment.deployment import Workers
from master.deployment.stages import one_stage
from master.vocabulary.vocabulary import table_bytes
from scheduler.model.machine import emulated_node
from scheduler.storage.disk import DirectDisk
from scheduler.storage.timed import TimedDisk
from tests.support.cluster.inprocess import ThreadedWorkers, in_process_deployment
from tests.support.models import write_tokenizer
from tpi.config import default_cache
from tpi.devices.emulated.device import EmulatedDevice, open_emulated
from tpi.devices.host import open_host
from tpi.devices.options import KvPlace, OffloadOptions, Weights
from tpi.kernels.kv import pages_for
from tpi.net.fields import GroupBatch
from tpi.net.messages import NodeOptions, PeerAddress, Step, StepEntry
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.trace import Row
from worker.equipment import AcceleratorSetup
from worker.node.node import Node
from worker.node_plan import node_plan
from worker.pipelines.accelerated import BatchAccelerated
from worker.pipelines.agree import GroupMember, agree
from worker.plan.choose import Choose

CONTEXT = 160  # tokens of a sequence at most
MIXTRAL = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 4096,
}  # fmt: skip
LLAMA = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 2752, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 8, "max_position_embeddings": 4096,
}  # fmt: skip


def mixture() -> Pack:
    """Write a pack of random weights in a small Mixtral's shape, in q4, unless it exists."""
    return _made("mixtral", MIXTRAL)


def dense() -> Pack:
    """Write a pack of random weights in a small Llama 2's shape without grouped-query attention, unless it exists."""
    return _made("llama", LLAMA)


def _made(family: str, shape: dict[str, int]) -> Pack:
    target = default_cache() / "benchmarks" / f"{family}-small.q4"
    if not target.exists():
        with TemporaryDirectory() as folder:
            _write(Path(folder), family, shape)
            pack_model(open_source(Path(folder)), "q4", target)
    return Pack.open(target)


class BatchNode:
    """One node with a batch of sequences of equal length, as many as its policy has in a batch.

    The nodes in `others` run the same steps.
    """

    def __init__(self, node: Node, device: EmulatedDevice, filled: int, others: Workers | None = None) -> None:
        assert isinstance(node.link, BatchAccelerated)
        self.link: BatchAccelerated = node.link
        self._emulation, self._node, self._others = device.emulation, node, others or ThreadedWorkers([])
        self.sequences, self._position, self._number = self.link.settings.policy.batch, filled, 0
        self._known = set[int]()  # sequences that the nodes have pages of
        shape = self.sequences, int(self.link.settings.problem.layer.hidden) // 4  # values are float32
        self._x = np.random.default_rng(0).normal(size=shape).astype(np.float32)

    @property
    def spans(self) -> list[Row]:
        """Recorded spans; none unless the node was opened with `trace`."""
        return list(self._node.trace.rows)

    def steps(self, count: int) -> tuple[float, dict[str, float], int]:
        """Run `count` steps. Return a step's mean seconds, each lane's busy share, and how many tasks overran.

        A task overran if it took longer than on the emulated machine.
        """
        before = {lane.name: lane.busy for lane in self._emulation.lanes}
        overruns, began = self._emulation.overruns, time.perf_counter()
        for _ in range(count):
            self._step()
        total = self._emulation.emulated_seconds(time.perf_counter() - began)
        use = {lane.name: (lane.busy - before[lane.name]) / total for lane in self._emulation.lanes}
        return total / count, use, self._emulation.overruns - overruns

    def prompts(self, tokens: int, longest: int) -> tuple[float, int]:
        """Run prompts of `tokens` tokens each, in steps of at most `longest` tokens.

        Return the seconds, and the bytes of weights that crossed the link.
        """
        each = longest // tokens
        before, began = self.link.figures.weight_bytes, time.perf_counter()
        for first in range(0, self.sequences, each):
            numbers = range(first, min(first + each, self.sequences))
            x = np.repeat(self._x[: len(numbers)], tokens, axis=0)
            self._run([self._entry(number, 0, tokens) for number in numbers], x)
        seconds = self._emulation.emulated_seconds(time.perf_counter() - began)
        self.link.wait_idle()
        return seconds, self.link.figures.weight_bytes - before

    def _step(self) -> None:
        self._run([self._entry(number, self._position, 1) for number in range(self.sequences)], self._x)
        self._position += 1

    def _entry(self, number: int, position: int, count: int) -> StepEntry:
        pages, known = pages_for(CONTEXT), number in self._known
        self._known.add(number)
        own = () if known else tuple(range(number * pages, (number + 1) * pages))
        return StepEntry(number, position, count, pages if known else 0, own)

    def _run(self, entries: Sequence[StepEntry], x: npt.NDArray[np.float32]) -> None:
        self._number += 1
        step = Step(1, 1, self._number, tuple(entries), (), x)
        self._others.step(step)
        self._node.run(step)


@contextmanager
def batch_node(
    device: str,
    sequences: int,
    filled: int,
    decide: Choose | None = None,
    memory: int = 0,
    trace: bool = False,
    nodes: int = 1,
    steps: int = 0,
    weights: Weights = "auto",
    kv: KvPlace = "auto",
    model: Callable[[], Pack] = mixture,
) -> Iterator[BatchNode]:
    """Open a node of `emu:` and `device` with `sequences` waiting sequences of `filled` tokens each.

    `decide` replaces the node's own planner. `memory` is the node's limit in bytes; 0 means all. With `trace`
    the node records its spans. The node may be one of several `nodes`, all alike, each with its part of the model.
    `steps` is the largest number of tokens in a step, if longer than a chunk. `weights` and `kv` say where weights, and
    keys and values, lie.
    """
    pack = model()
    with ExitStack() as stack:
        devices = [stack.enter_context(closing(open_emulated(device))) for _ in range(nodes)]
        beside = [
            AcceleratorSetup(one, emulated_node(one.emulation.machine), OffloadOptions(weights, kv, "batch"), decide)
            for one in devices
        ]
        emulation = devices[0].emulation
        options: dict[str, Any] = {
            "chunk": max(512, sequences, steps),
            "context": CONTEXT,
            "pool": sequences * pages_for(CONTEXT),
            "threads": 1,
            "memory": memory,
            "trace": trace,
            "scheduler": "window" if memory else "resident",
        }
        if nodes > 1 or steps:
            options["batch"] = _agreed(pack, beside, options)
        deployment = in_process_deployment(
            pack,
            [1] * nodes,
            Path(stack.enter_context(TemporaryDirectory())),
            hosts={rank: one.emulation.host(open_host()) for rank, one in enumerate(devices)},
            disk=TimedDisk(DirectDisk(), emulation.disk),
            accelerators=dict(enumerate(beside)),
            **options,
        )
        stack.enter_context(closing(deployment))
        yield BatchNode(deployment.node, devices[0], filled, deployment._workers)


def _agreed(pack: Pack, beside: Sequence[AcceleratorSetup], options: dict[str, Any]) -> GroupBatch:
    stages = one_stage(pack, [1] * len(beside))
    peers = [PeerAddress(rank, f"node {rank}", "") for rank in range(len(beside))]
    node = NodeOptions(CONTEXT, options["pool"], kv_dtype(pack), options["chunk"], memory=options["memory"])
    plans = assignments(pack, stages, peers, node, session=1, epoch=1, collective="loopback")
    return agree(
        [
            GroupMember(f"node {rank}", node_plan(plan), one.machine, one.options, None if rank else table_bytes(pack))
            for rank, (plan, one) in enumerate(zip(plans, beside, strict=True))
        ]
    )


def _write(folder: Path, family: str, shape: dict[str, int]) -> None:
    """Write random weights as a Hugging Face model directory."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **shape)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    write_tokenizer(folder)

"""The TPI-LLM paper's tables 1, 2 and 6: peak memory per device of its models, next to TPI's prediction."""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.memory.unwritten import UnwrittenPack
from benchmarks.result import Result, Row, Table
from benchmarks.support.machine import MIB
from master.deployment.assignments import assignments
from master.deployment.deploy import kv_dtype
from master.deployment.stages import one_stage
from master.vocabulary.vocabulary import table_bytes
from scheduler.model.sizes import LONGEST_CHUNK
from tests.support.weights.shapes import LLAMA_1B
from tpi.kernels.kv import pages_for
from tpi.net.messages import NodeOptions, PeerAddress
from tpi.pack.reader import Pack
from worker.node_plan import node_plan
from worker.plan.fit import fit

CONTEXT, DEVICES, WINDOWS = 64, (2, 4, 6, 8), (2, 4)
BARE = (57, 41)  # MiB of a bare master and worker, as measured by `benchmarks.memory.peaks`
THREADS = 2
NOTES = f"""
**Predicted, not run.** The shapes of the paper's seven models in f32, as in the paper, context {CONTEXT}. Figures are
the memory that the plan assigns to each node: weights and ring, keys and values, activations and buffers, plus a bare
process of {BARE[0]} MiB (master) or {BARE[1]} MiB (worker). *Predicted peak memory* shows that such predictions are
within 10% of real processes. *70B on eight nodes* runs one of these shapes in 4 bits. The paper's peak memory per
device is shown for comparison. Its times to the first token and per token are those of its table 1 for eight devices;
nothing is timed here. The largest node comes first: the master, which has the embedding and the head. MiB.
"""


@dataclass(frozen=True)
class Model:
    """A model's shape, and the paper's figures: seconds, and GB per device with and without its memory scheduler."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    without: tuple[float, ...]  # table 2, on 2, 4, 6, 8 devices
    windows: tuple[tuple[float, ...], tuple[float, ...]]  # tables 2 and 6 (windows 2 and 4), on as many devices
    first: float  # table 1: seconds to the first token, with the scheduler
    latency: float  # table 1: seconds per token, with the scheduler

    @property
    def shape(self) -> dict[str, object]:
        """Keys of a Hugging Face config.json."""
        return LLAMA_1B | {
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "vocab_size": self.vocab,
        }


# fmt: off
MODELS = (
    Model("Llama 2-3B", 3200, 8640, 26, 32, 32, 32000, (7.3, 4.3, 3.2, 2.8),
          ((1.5, 1.4, 1.4, 1.4), (1.7, 1.5, 1.5, 1.5)), 2.0, 1.9),
    Model("Llama 2-7B", 4096, 11008, 32, 32, 32, 32000, (13.7, 7.7, 5.5, 4.5),
          ((2.0, 1.8, 1.7, 1.7), (2.4, 2.1, 1.8, 1.8)), 3.0, 2.6),
    Model("Llama 2-13B", 5120, 13824, 40, 40, 40, 32000, (25.7, 13.9, 9.8, 8.1),
          ((2.3, 2.2, 2.2, 2.1), (2.8, 2.5, 2.3, 2.2)), 5.8, 2.9),
    Model("Llama 2-70B", 8192, 28672, 80, 64, 8, 32000, (130, 66.6, 46.6, 34.9),
          ((3.7, 3.3, 3.3, 3.1), (4.5, 3.1, 3.1, 3.1)), 29.4, 26.1),
    Model("Llama 3.1-8B", 4096, 14336, 32, 32, 8, 128256, (18.4, 11.8, 9.4, 8.5),
          ((5.9, 5.6, 5.5, 5.4), (6.3, 5.8, 5.6, 5.5)), 4.5, 4.3),
    Model("Llama 3.1-70B", 8192, 28672, 80, 64, 8, 128256, (137.7, 74.0, 51.1, 42.3),
          ((10.8, 10.5, 11.4, 11.3), (10.8, 10.5, 11.5, 11.4)), 32.9, 29.9),
    Model("Yi-34B", 7168, 20480, 60, 56, 8, 64000, (67, 36.4, 23.9, 20.4),
          ((5.0, 5.0, 5.0, 4.9), (6.0, 5.6, 5.3, 5.2)), 15.7, 13.7),
)
# fmt: on


def bench(quick: bool) -> Result:
    """Predict the peak memory of all models of the paper, or of the first if `quick`."""
    models = [(model, UnwrittenPack(model.shape, "f32")) for model in (MODELS[:1] if quick else MODELS)]
    tables = [Table("Table 1: eight devices, window of 2 blocks", [_overview(*one) for one in models])]
    for number, window in zip((2, 6), WINDOWS, strict=True):
        rows = [row for one in models for row in _by_devices(*one, window)]
        tables.append(Table(f"Table {number}: by devices, window of {window} blocks", rows))
    return Result("The paper's other models", NOTES, tables, timed=False)


def predicted(pack: Pack, devices: int, window: int) -> tuple[int, int]:
    """Predict the peak MiB of the master and of the largest worker; `window` 0 means without the scheduler."""
    options = NodeOptions(
        CONTEXT, pages_for(CONTEXT), kv_dtype(pack), LONGEST_CHUNK, memory=1 << 44, threads=THREADS,
        scheduler="window" if window else "resident", window=window,
    )  # fmt: skip
    stages = one_stage(pack, [1.0] * devices)
    peers = [PeerAddress(rank, f"node{rank}", f"tcp://node{rank}:1") for rank in range(devices)]
    nodes = [node_plan(assign) for assign in assignments(pack, stages, peers, options, 1, 1, "star")]
    used = [fit(node, None if node.rank else table_bytes(pack)).used // MIB for node in nodes]
    return BARE[0] + used[0], BARE[1] + max(used[1:])


def _overview(model: Model, pack: Pack) -> Row:
    off, on = predicted(pack, DEVICES[-1], 0), predicted(pack, DEVICES[-1], WINDOWS[0])
    return {
        "model": model.name,
        "without scheduler: master": off[0],
        "worker": off[1],
        "paper, GB": model.without[-1],
        "with scheduler: master": on[0],
        "worker ": on[1],
        "paper, GB ": model.windows[0][-1],
        "paper's first token, s": model.first,
        "paper's s/token": model.latency,
    }


def _by_devices(model: Model, pack: Pack, window: int) -> Iterator[Row]:
    for at, devices in enumerate(DEVICES):
        master, worker = predicted(pack, devices, window)
        yield {
            "model": model.name,
            "devices": devices,
            "master": master,
            "worker": worker,
            "paper, GB": model.windows[WINDOWS.index(window)][at],
            "paper without scheduler, GB": model.without[at],
        }

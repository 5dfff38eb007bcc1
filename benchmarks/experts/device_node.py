"""A mixture of experts on a node with an emulated accelerator, token by token, in the time of the emulated machine."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from master.deployment.assignments import assignments
from master.deployment.deploy import kv_dtype
from master.deployment.stages import one_stage
from master.generation.engine import Engine
from master.generation.request import Request
from master.profiling.routing import record_routing
from master.vocabulary.sampler import Sampler, Sampling
from master.vocabulary.vocabulary import table_bytes
from scheduler.demand.stats import DemandStats
from scheduler.model.machine import NodeMachine, emulated_node
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.models import write_tokenizer
from tpi.config import default_cache
from tpi.devices.emulated.device import EmulatedDevice, open_emulated
from tpi.devices.host import open_host
from tpi.kernels import open_kernels
from tpi.kernels.spec import PAGE_TOKENS
from tpi.net.messages import NodeOptions, PeerAddress
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.progress import silent
from worker.demand.accelerated import ExpertAccelerated
from worker.demand.arena import ExpertArena
from worker.equipment import AcceleratorSetup
from worker.node.node import Node
from worker.node_plan import NodePlan, node_plan
from worker.plan.case import Case
from worker.plan.choose import Choose
from worker.plan.modes.experts import from_memory

CONTEXT, CHUNK = 256, 64
PROMPT = [60, 61, 62, 63]
OLMOE = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 8, "num_experts": 32, "num_experts_per_tok": 4, "max_position_embeddings": 4096,
}  # fmt: skip
UNITS = OLMOE["num_hidden_layers"] * OLMOE["num_experts"]
RECORDED = 8, 64  # sequences of so many random tokens
SKEWED = 1.0  # standard deviation of the bias of an expert, in logits
COMMON = 1.0  # weight of the vector that all token embeddings have in common


@dataclass(frozen=True)
class ExpertSteps:
    """The mean seconds of a token on the emulated machine, counts of the same steps, and all tokens so far."""

    seconds: float
    counts: DemandStats
    tokens: tuple[int, ...]


def mixture(recorded: bool) -> Pack:
    """Write a q4 pack of random weights in a small OLMoE's shape whose routers have favourites, unless it exists.

    With `recorded`, the pack has its recorded routing.
    """
    root = default_cache() / "benchmarks"
    target, other = root / "olmoe-small.q4", root / "olmoe-small-recorded.q4"
    if not target.exists():
        with TemporaryDirectory() as folder:
            _write(Path(folder))
            pack_model(open_source(Path(folder)), "q4", target)
    if not other.exists():
        shutil.copytree(target, other)
    pack = Pack.open(other if recorded else target)
    if recorded:
        tokens = np.random.default_rng(5).integers(3, OLMOE["vocab_size"], RECORDED).astype(np.int32)
        record_routing(pack, tokens, open_kernels(), silent)
    return pack


class ExpertNode:
    """A node that runs in this process, and the only sequence that it decodes."""

    def __init__(self, node: Node, engine: Engine, device: EmulatedDevice) -> None:
        self.node, self._engine, self.device = node, engine, device
        self.emulation = device.emulation
        self._tokens: list[int] = []
        sequence = engine.admit(PROMPT)
        sampler = Sampler(Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3))
        engine.submit(Request(sequence, sampler, 10_000, self._take))
        while not self._tokens:
            engine.step()

    @property
    def arena(self) -> ExpertArena | None:
        """Arena of the experts that are loaded on demand, if there is one."""
        link = self.node.link
        return link.arena if isinstance(link, ExpertAccelerated) else None

    def run(self, steps: int) -> ExpertSteps:
        """Run `steps` steps of one token each, and return their mean figures."""
        clock = self.emulation.clock
        before, began = self._counts(), clock.now()
        for _ in range(steps):
            self._engine.step()
        total = self.emulation.emulated_seconds(clock.now() - began)
        after = self._counts()
        changed = {name: getattr(after, name) - getattr(before, name) for name in vars(after)}
        return ExpertSteps(total / max(1, steps), DemandStats(**changed), tuple(self._tokens))

    def _counts(self) -> DemandStats:
        return self.arena.cache.stats() if self.arena else DemandStats()

    def _take(self, sampled: Any) -> bool:
        self._tokens.append(sampled.token)
        return True


@contextmanager
def expert_node(pack: Pack, machine: str, decide: Choose) -> Iterator[ExpertNode]:
    """Open a node with the emulated `machine`, whose accelerator follows the plan of `decide`."""
    with ExitStack() as stack:
        device = stack.enter_context(closing(open_emulated(machine)))
        emulation = device.emulation
        beside = AcceleratorSetup(device, emulated_node(emulation.machine), choose=decide)
        deployment = in_process_deployment(
            pack, [1], Path(stack.enter_context(TemporaryDirectory())), chunk=CHUNK, context=CONTEXT,
            pool=CONTEXT // PAGE_TOKENS, threads=1, host=emulation.host(open_host()), accelerators={0: beside},
        )  # fmt: skip
        stack.enter_context(closing(deployment))
        yield ExpertNode(deployment.node, Engine(deployment), device)


def memory_for(pack: Pack, machine: NodeMachine, share: float) -> int:
    """Return the bytes of accelerator memory that hold the share `share` of the experts and all other weights."""
    plan, least, enough = _plan(pack), 0, 1 << 30
    while enough - least > PAGE_TOKENS:
        middle = (least + enough) // 2
        room = machine.with_cards(partial(_with_memory, size=middle))
        found = from_memory(Case(plan, room, tables=table_bytes(pack)))
        holds = found is not None and found.details.slots >= share * UNITS
        least, enough = (least, middle) if holds else (middle, enough)
    return enough


def _with_memory(card: Any, size: int) -> Any:
    return replace(card, memory=size)


def _plan(pack: Pack) -> NodePlan:
    stages, options = (
        one_stage(pack, [1]),
        NodeOptions(CONTEXT, CONTEXT // PAGE_TOKENS, kv_dtype(pack), CHUNK),
    )
    (assign,) = assignments(pack, stages, [PeerAddress(0, "node", "")], options, 1, 1, collective="loopback")
    return node_plan(assign)


def _write(folder: Path) -> None:
    """Write random weights as a Hugging Face model directory.

    All token embeddings have a common part, so each router has favourites.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.OlmoeConfig(**OLMOE))
    hidden = OLMOE["hidden_size"]
    with torch.no_grad():
        common = torch.randn(hidden)
        table = model.model.embed_tokens.weight
        table.copy_(torch.randn(table.shape) + COMMON * common)
        model.lm_head.weight.normal_(0, 2 * hidden**-0.5)
        for layer in model.model.layers:
            gate = layer.mlp.gate.weight
            favour = SKEWED * torch.randn(len(gate), 1) * common / hidden
            gate.copy_(torch.randn(gate.shape) * 1.5 * hidden**-0.5 + favour)
    model.save_pretrained(folder)
    write_tokenizer(folder)

"""A node with an emulated accelerator whose neurons are chosen token by token, in the time of the emulated machine."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from master.generation.engine import Engine
from master.generation.request import Request
from master.vocabulary.sampler import Sampler, Sampling
from scheduler.model.machine import emulated_node
from scheduler.model.offload.work import Offload
from scheduler.neurons.arena import NeuronArena
from scheduler.neurons.migration import ArenaFigures, MigrationSettings
from tests.support.cluster.inprocess import in_process_deployment
from tpi.devices.emulated.device import open_emulated
from tpi.devices.emulated.emulation import Emulation
from tpi.devices.host import open_host
from tpi.kernels.spec import PAGE_TOKENS
from tpi.pack.reader import Pack
from tpi.sparsity.files import NAME, load_predictors
from tpi.sparsity.predictor import Predictor
from worker.equipment import AcceleratorSetup
from worker.neurons.accelerated import NeuronAccelerated
from worker.plan.case import Candidate, Case, layer_pages_bytes
from worker.plan.choose import Choose
from worker.plan.modes.neurons import NeuronSetup, plan_on_accelerator
from worker.plan.offload import MemoryRule, OffloadPlan
from worker.plan.segments import whole_blocks

F64 = npt.NDArray[np.float64]
CONTEXT = 256
PROMPT = [60, 61, 62, 63]


@dataclass(frozen=True)
class SparseSteps:
    """The mean seconds of a token on the emulated machine, and neuron counts of the same steps.

    `tokens` are all tokens generated since the prompt.
    """

    seconds: float
    figures: ArenaFigures
    tokens: tuple[int, ...]

    @property
    def there(self) -> float:
        """The share of the active neurons that the accelerator computed."""
        return self.figures.active_on_accelerator / max(1, self.figures.active)

    @property
    def here_time(self) -> float:
        """The CPU's share of the time in which CPU and accelerator computed neurons."""
        both = self.figures.cpu_seconds + self.figures.accelerator_seconds
        return self.figures.cpu_seconds / both if both else 1.0


class SparseNode:
    """A node of one process, and the only sequence that it decodes."""

    def __init__(self, engine: Engine, emulation: Emulation, arena: NeuronArena | None) -> None:
        self.engine, self.emulation, self.arena = engine, emulation, arena
        self._tokens: list[int] = []
        sequence = engine.admit(PROMPT)
        request = Request(sequence, Sampler(Sampling(temperature=0)), 10_000, self._take)
        engine.submit(request)
        while not self._tokens:
            engine.step()

    def run(self, steps: int) -> SparseSteps:
        """Run `steps` steps of one token each, and return their mean figures."""
        before = self._figures()
        began = time.perf_counter()
        for _ in range(steps):
            self.engine.step()
        total = self.emulation.emulated_seconds(time.perf_counter() - began)
        after = self._figures()
        changed = {name: getattr(after, name) - getattr(before, name) for name in vars(after)}
        return SparseSteps(total / steps, ArenaFigures(**changed), tuple(self._tokens))

    def _figures(self) -> ArenaFigures:
        return ArenaFigures() if self.arena is None else replace(self.arena.figures)

    def _take(self, sampled: Any) -> bool:
        self._tokens.append(sampled.token)
        return True


@contextmanager
def sparse_node(pack: Pack, machine: str, decide: Choose, trace: bool = False) -> Iterator[SparseNode]:
    """Open a node with the emulated `machine`, whose accelerator follows the plan of `decide`."""
    with ExitStack() as stack:
        device = stack.enter_context(closing(open_emulated(machine)))
        emulation = device.emulation
        cache = Path(stack.enter_context(TemporaryDirectory()))
        beside = AcceleratorSetup(device, emulated_node(emulation.machine), choose=decide)
        deployment = in_process_deployment(
            pack, [1], cache, context=CONTEXT, pool=CONTEXT // PAGE_TOKENS, host=emulation.host(open_host()),
            accelerators={0: beside}, trace=trace,
        )  # fmt: skip
        stack.enter_context(closing(deployment))
        link = deployment.node.link
        arena = link.arena if isinstance(link, NeuronAccelerated) else None
        yield SparseNode(Engine(deployment), emulation, arena)


def predictors_of(pack: Pack, ahead: int) -> dict[int, Predictor]:
    """Load a pack's predictors, each moved to run `ahead` layers before its own."""
    return {
        layer: replace(predictor, ahead=min(layer, ahead))
        for layer, predictor in load_predictors(pack.path / NAME).items()
    }


def frequencies(predictors: dict[int, Predictor]) -> dict[int, F64]:
    """Return the probability that each neuron is active, by layer.

    A synthetic model stores these in its biases (`tests.support.weights.regular`).
    """
    found = {}
    for layer, predictor in predictors.items():
        assert predictor.bias is not None
        found[layer] = ndtr(predictor.bias.astype(np.float64))
    return found


def hybrid(setup: NeuronSetup) -> Choose:
    """Return a planner that divides neurons between CPU and accelerator."""
    return partial(plan_on_accelerator, setup=setup)


def setup_of(
    predictors: dict[int, Predictor], moving: MigrationSettings, frequency: dict[int, F64] | None = None
) -> NeuronSetup:
    """Return a neuron setup that places neurons by `frequency`, by default the model's own."""
    return NeuronSetup(frequency or frequencies(predictors), predictors, migration=moving)


def by_layers(case: Case) -> Candidate[None]:
    """Plan whole layers: as many of the first as fit on the accelerator, and the others dense on the CPU."""
    plan = case.plan
    pieces = tuple(replace(piece, device=1) for piece in whole_blocks(plan))
    problem = case.problem(pieces)
    room, kept = problem.free_bytes[0], set()
    for layer in range(plan.config.layers):
        own = [number for number, piece in enumerate(pieces) if piece.block.layer == layer]
        room -= sum(pieces[number].nbytes + 4096 for number in own) + layer_pages_bytes(plan)
        if room < 0:
            break
        kept.update(own)
    tiers: Any = tuple("gpu" if number in kept else "ram" for number in range(len(pieces)))
    places: Any = tuple("accelerator" if number in kept else "host" for number in range(len(pieces)))
    nothing: frozenset[int] = frozenset()
    offload = OffloadPlan(
        pieces, frozenset(kept), nothing, nothing, 1, "ram", 1, layer_pages_bytes(plan), problem,
        Offload(tiers, places, places, "ram", "memory"), problem.tokens, memory=MemoryRule(in_ram=True),
    )  # fmt: skip
    return Candidate("offload", None, offload)

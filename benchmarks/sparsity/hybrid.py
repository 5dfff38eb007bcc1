"""Neurons on an emulated accelerator and the CPU: the gain from each part of PowerInfer and of DynamicInfer."""

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from benchmarks.result import Bars, Check, Result, Row, Table
from benchmarks.sparsity.emulated import (
    SparseNode,
    SparseSteps,
    by_layers,
    frequencies,
    hybrid,
    predictors_of,
    setup_of,
    sparse_node,
)
from benchmarks.support.models import reglu_layers
from scheduler.neurons.migration import DYNAMIC, STATIC, MigrationSettings
from tpi.pack.reader import Pack
from tpi.sparsity.predictor import Predictor
from worker.plan.choose import Choose

RATES = "link=0.5GB/s,memory=16GB/s,flops=1TFLOP/s,host_memory=1.6GB/s,host_flops=0.1TFLOP/s"
TIMES = "latency=20us,launch=20us,stretch=32"
WARM, STEPS, ROUNDS = 16, 12, 2
AHEAD = 1
ACTIVATIONS = 24 << 20  # bytes of a prompt's longest step, in addition to the weights
WHOLE, MIGRATING = 2.0, 1.15
MICRO, MACRO = MigrationSettings(weight=0.0, balance=False), MigrationSettings(balance=False)
NOTES = f"""
Eight layers of the 1.1B shape with ReLU in 4 bits, about 10% of the neurons active, on an emulated accelerator whose
memory holds a third of the weights (and activations). The machine is the papers' PC-Low at a twentieth of its speed, so
that the real work is never the bottleneck; **its figures judge schedules, never kernels**. Figures are milliseconds of
the emulated machine, medians of {ROUNDS} interleaved rounds of {STEPS} tokens, after {WARM} tokens.

- *split by layers* is llama.cpp's split: the first layers are on the accelerator as a whole, and all neurons are
  computed.
- *+ operators*: only active neurons are computed, still split by layers. *+ engine*: the accelerator has neurons of
  every layer, chosen at random. *+ policy* (`--sparsity static`): the integer program chooses them. These are the steps
  of PowerInfer's figure 15. From *+ engine* on, attention is on the accelerator.
- *+ micro*: neurons move according to the prediction for this token alone. *+ macro*: they also move according to how
  often they were active. *+ threshold* (`--sparsity dynamic`): accelerator and CPU have separate thresholds. These are
  the steps of DynamicInfer's ablation.

The frequencies of the synthetic model do not change with the text, so a static placement is at its best: neurons move
only for single tokens. `there` is the share of the active neurons that the accelerator computed. `CPU's time` is the
CPU's share of the FFN time of both sides. `same` is the share of tokens equal to those of the split by layers.
"""


@dataclass(frozen=True)
class Variant:
    """One configuration: its name, and the planner of its accelerator."""

    name: str
    decide: Choose


def variants(predictors: dict[int, Predictor]) -> list[Variant]:
    """Return all variants, in the papers' order."""
    layers = len(predictors)
    often = frequencies(predictors)
    random = np.random.default_rng(0)
    first = {layer: np.full(len(each), 1.0 - layer / layers) for layer, each in often.items()}
    anyhow = {layer: random.permutation(each) for layer, each in often.items()}
    made = [("+ operators", STATIC, first), ("+ engine", STATIC, anyhow), ("+ policy (static)", STATIC, often)]
    made += [("+ micro", MICRO, often), ("+ macro", MACRO, often), ("+ threshold (dynamic)", DYNAMIC, often)]
    return [Variant("split by layers", by_layers)] + [
        Variant(name, hybrid(setup_of(predictors, moving, frequency))) for name, moving, frequency in made
    ]


def bench(quick: bool) -> Result:
    """Measure the ablation at a third of the model, and static against dynamic placement at other memory sizes."""
    pack = Pack.open(reglu_layers().path)
    predictors = predictors_of(pack, AHEAD)
    chosen = variants(predictors)
    found = _measured(
        pack, [(each.name, _machine(pack, 1 / 3), each.decide) for each in chosen], 1 if quick else ROUNDS
    )
    shares = () if quick else (0.28, 0.45, 0.6)
    moved = {variant.name: variant for variant in chosen}
    kinds = ("+ policy (static)", "+ threshold (dynamic)")
    others = [(f"{share} {kind}", _machine(pack, share), moved[kind].decide) for share in shares for kind in kinds]
    memory = _measured(pack, others, 1)
    layers, static, dynamic = (found[name].seconds for name in (chosen[0].name, *kinds))
    checks = [
        Check("dynamic over a split by layers", layers / dynamic, WHOLE),
        Check("dynamic over static", static / dynamic, MIGRATING),
    ]
    tokens = found[chosen[0].name].tokens
    rows = [_row(each.name, found[each.name], layers, tokens) for each in chosen]
    tables = [Table("A third of the model on the accelerator", rows)]
    if shares:
        tables.append(Table("By the accelerator's memory", [_by_memory(share, memory, kinds) for share in shares]))
    plot = Bars("Tokens per second", "tok/s", ["1/3"], {each.name: [1 / found[each.name].seconds] for each in chosen})
    return Result("Neurons on accelerator and CPU", NOTES, tables, checks, [plot])


def _machine(pack: Pack, share: float) -> str:
    weights = sum(block.shape.nbytes for layer in pack.layers for block in layer)
    return f"{int(share * weights) + ACTIVATIONS},{RATES},{TIMES}"


def _measured(pack: Pack, asked: list[tuple[str, str, Choose]], rounds: int) -> dict[str, SparseSteps]:
    """Return the median round of each variant. All nodes are open at once, so that they can take turns."""
    found: dict[str, list[SparseSteps]] = {name: [] for name, _, _ in asked}
    with ExitStack() as stack:
        nodes = [(name, _opened(stack, pack, machine, decide)) for name, machine, decide in asked]
        for _ in range(rounds):
            for name, node in nodes:
                found[name].append(node.run(STEPS))
    return {name: sorted(steps, key=lambda one: one.seconds)[len(steps) // 2] for name, steps in found.items()}


def _opened(stack: ExitStack, pack: Pack, machine: str, decide: Choose) -> SparseNode:
    node: SparseNode = stack.enter_context(sparse_node(pack, machine, decide))
    if node.arena is not None:
        node.run(WARM)
    return node


def _row(name: str, steps: SparseSteps, layers: float, tokens: tuple[int, ...]) -> Row:
    figures, sparse = steps.figures, steps.figures.active > 0
    equal = sum(one == other for one, other in zip(steps.tokens, tokens, strict=False))
    return {
        "": name,
        "ms per token": 1e3 * steps.seconds,
        "gain": layers / steps.seconds,
        "there": steps.there if sparse else "",
        "CPU's time": steps.here_time if sparse else "",
        "moved, neurons a token": figures.moved / STEPS,
        "same": f"{equal} of {min(len(steps.tokens), len(tokens))}",
    }


def _by_memory(share: float, memory: dict[str, SparseSteps], kinds: tuple[str, ...]) -> Row:
    static, dynamic = (memory[f"{share} {kind}"] for kind in kinds)
    return {
        "of the model": share,
        "static, ms": 1e3 * static.seconds,
        "dynamic, ms": 1e3 * dynamic.seconds,
        "gain": static.seconds / dynamic.seconds,
        "there, static": static.there,
        "there, dynamic": dynamic.there,
    }

"""Experts loaded on demand to an emulated accelerator with room for a third of all, against plans that move none."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.experts.device_node import ExpertNode, ExpertSteps, expert_node, memory_for, mixture
from benchmarks.result import Bars, Check, Result, Row, Table
from benchmarks.sparsity.emulated import by_layers
from scheduler.demand.stats import DemandStats
from scheduler.model.machine import emulated_node
from tpi.devices.emulated.machine import parse_emulated
from tpi.pack.reader import Pack
from worker.plan.case import Candidate, Case
from worker.plan.choose import Choose
from worker.plan.modes import offload
from worker.plan.modes.experts import CardSlots, from_memory

RATES = (
    "link={link}GB/s,memory=16GB/s,flops=1TFLOP/s,host_memory=1.6GB/s,host_flops=0.1TFLOP/s,latency=20us,launch=20us,"
    "ram=4GiB,stretch=16"
)
SHARE = 1 / 3
LINKS = (0.5, 4.0)  # GB/s
STEPS, ROUNDS = 12, 4
LAYERS, PLAN, DEMAND, KNOWN = "whole layers", "the existing plan", "on demand", "on demand, profiled"
OVER_LAYERS, OVER_PLAN, PEAK = 2.0, 1.5, 0.1  # aims
NOTES = f"""
A small OLMoE's shape (6 layers of 32 experts, 4 of them for each token, hidden size 512, q4) with random weights. Its
routers prefer some experts. The memory of the emulated accelerator holds everything but two thirds of the experts. The
machine is a desktop at a twentieth of its speed: the CPU reads RAM three times as fast as the slower link transfers,
and the faster link transfers an expert sooner than the CPU computes it. Figures are milliseconds per token on the
emulated machine, medians of {ROUNDS} rounds of {STEPS} tokens, interleaved. All variants get the same random text.
**Emulated figures judge schedules, never kernels.**

- *whole layers* is llama.cpp's split. *the existing plan* keeps what the cost model of docs/offloading.md chooses,
  which may be parts of every layer. Neither moves weights.
- *on demand* begins with the same experts of every layer, since the routing is not known. *profiled* begins with the
  record that `tpi profile` makes from other text.

`found` is the share of the chosen experts that were on the accelerator; `Belady` is the share with Belady's policy from
the same beginning. `CPU` is the share that the CPU computed; the remaining experts were fetched. `overran` counts the
tasks whose real work took more than half of their slot.
"""


@dataclass(frozen=True)
class Measured:
    """The median round of a variant, and the counts of all its rounds."""

    seconds: float
    counts: DemandStats
    tokens: tuple[int, ...]
    belady: float
    peak: float  # of the accelerator's memory: planned over taken
    overran: int


def bench(quick: bool) -> Result:
    """Measure all variants on two link speeds, or on one in one round if `quick`."""
    plain, known = mixture(recorded=False), mixture(recorded=True)
    variants: dict[str, tuple[Pack, Choose]] = {
        LAYERS: (plain, by_layers),
        PLAN: (plain, offload.propose),
        DEMAND: (plain, _on_demand),
        KNOWN: (known, _on_demand),
    }
    links = LINKS[:1] if quick else LINKS
    found = {link: _measured(RATES.format(link=link), variants, 1 if quick else ROUNDS) for link in links}
    tables = [Table(f"A link of {link:g} GB/s", _rows(of)) for link, of in found.items()]
    slow = found[LINKS[0]]
    checks = [
        Check("slow link: gain over whole layers", slow[LAYERS].seconds / slow[KNOWN].seconds, OVER_LAYERS),
        Check("slow link: gain over the existing plan", slow[PLAN].seconds / slow[KNOWN].seconds, OVER_PLAN),
        Check("planned over taken memory", max(of[KNOWN].peak for of in found.values()), 1.0, within=PEAK),
    ]
    names = [f"{link:g} GB/s" for link in found]
    series = {name: [1 / of[name].seconds for of in found.values()] for name in variants}
    plot = Bars("Tokens per second", "tok/s", names, series)
    return Result("Experts loaded to an accelerator on demand", NOTES, tables, checks, [plot])


def _on_demand(case: Case) -> Candidate[CardSlots]:
    found = from_memory(case)
    assert found is not None  # the memory is made so
    return found


def _measured(rates: str, variants: Mapping[str, tuple[Pack, Choose]], rounds: int) -> dict[str, Measured]:
    """Measure every variant in turn, `rounds` times."""
    memory = memory_for(variants[KNOWN][0], emulated_node(parse_emulated(f"1GiB,{rates}")), SHARE)
    found: dict[str, list[ExpertSteps]] = {name: [] for name in variants}
    with ExitStack() as stack:
        nodes = {
            name: stack.enter_context(expert_node(pack, f"{memory},{rates}", decide))
            for name, (pack, decide) in variants.items()
        }
        for _ in range(rounds):
            for name, node in nodes.items():
                found[name].append(node.run(STEPS))
        return {name: _of(nodes[name], steps) for name, steps in found.items()}


def _of(node: ExpertNode, steps: list[ExpertSteps]) -> Measured:
    plan = node.node.offload
    assert plan is not None
    taken = node.device.memory.used
    middle = sorted(one.seconds for one in steps)[len(steps) // 2]
    counts = node.arena.cache.stats() if node.arena else DemandStats()
    belady = node.arena.best().hit_rate if node.arena else 0.0
    return Measured(middle, counts, steps[-1].tokens, belady, plan.memory_bytes / taken, node.emulation.overruns)


def _rows(found: Mapping[str, Measured]) -> list[Row]:
    return [_row(name, one, found) for name, one in found.items()]


def _row(name: str, one: Measured, found: Mapping[str, Measured]) -> Row:
    counts, tokens = one.counts, found[LAYERS].tokens
    moves = counts.uses > 0
    equal = sum(mine == theirs for mine, theirs in zip(one.tokens, tokens, strict=True))
    return {
        "": name,
        "ms per token": 1e3 * one.seconds,
        "gain over layers": found[LAYERS].seconds / one.seconds,
        "over the plan": found[PLAN].seconds / one.seconds,
        "found": counts.hit_rate if moves else "",
        "Belady": one.belady if moves else "",
        "CPU": counts.elsewhere / counts.uses if moves else "",
        "MB per token": counts.bytes_per_step / 1e6 if moves else 0.0,
        "same": f"{equal} of {len(tokens)}",
        "overran": one.overran,
    }

"""The effect of renumbering neurons on real activations: counts of the trained ReGLU model, independent of load."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks.result import Check, Result, Row, Table
from master.profiling.measure import profile_model
from master.profiling.numbering import Numbering
from scheduler.budget import Budget
from scheduler.demand.records.stats import RecordStats
from scheduler.storage.tune import DiskSpeed
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.offloading import answers
from tests.support.devices.predicted import exact_predictors
from tests.support.weights.trained import TEXT, write_trained
from tpi.kernels import open_kernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.partition import deal
from tpi.progress import silent
from tpi.sparsity.files import NAME, load_predictors, save_predictors
from tpi.sparsity.renumber import I32, load_imbalance, renumbered_profile, runs_of_active
from tpi.sparsity.replay import cut_sequences
from tpi.sparsity.usage import NeuronProfile
from worker.plan.case import Candidate, Case
from worker.plan.modes import neurons
from worker.plan.records import RecordPlan, read_by_neuron

GAPS = (0, 8 << 10)  # bytes that are read along
CONTEXT, PROMPT, ANSWER = 128, 16, 64  # tokens
SLOTS = 0.25  # of the neurons
ANSWERS, LESS, EVEN = 12, 0.9, 1.1
NOTES = f"""
The trained ReGLU model (2.4 M parameters, q8), profiled on the first three quarters of its text. It generates
{ANSWERS} answers of {ANSWER} tokens to pieces of the last quarter, with predictors that are always right, and slots for
{SLOTS:.0%} of all neurons. *own*: the model's own numbers. *renumbered*: by `tpi profile`, for one node. Reads are
those of `scheduler.demand.records.tier.RecordTier`, which also reads up to the given number of bytes between two
records. The second table is the work of the busiest of three equal nodes, as a multiple of the fair share. Numbers that
were made for one node give the first node nearly twice its share, so three nodes do not use them.
"""


def bench(quick: bool) -> Result:
    """Count reads before and after renumbering."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory()))
        pack = _packed(directory)
        known, new = _texts(pack)
        use, seen = _used(pack, known), _used(pack, new)
        one, three = (Numbering.of(pack, use, shares) for shares in ([1], [1, 1, 1]))
        one.keep(directory, silent)
        asked = new[: 2 if quick else ANSWERS, :PROMPT].tolist()
        packs = {"own": pack, "renumbered": Pack.open(one.path)}
        found = {(name, gap): _read(each, directory, asked, gap) for gap in GAPS for name, each in packs.items()}
    runs = {"own": runs_of_active(seen), "renumbered": runs_of_active(seen, one.orders)}
    rows = [_row(name, gap, runs[name], stats) for (name, gap), stats in found.items()]
    loads = [_busiest(seen, orders) for orders in (None, one.orders, three.orders)]
    numbers = ("own", "renumbered for one node", "renumbered for three nodes")
    shares: list[Row] = [{"numbers": name, "busiest node": load} for name, load in zip(numbers, loads, strict=True)]
    checks = [*_checks(found), Check("the busiest of three nodes, in fair parts", loads[2], EVEN, at_most=True)]
    tables = [Table("Reads", rows), Table("Three nodes", shares)]
    return Result("Numbers of neurons", NOTES, tables, checks)


def _packed(directory: Path) -> Pack:
    pack_model(open_source(write_trained(directory / "model")), "q8", directory / "pack")
    pack = Pack.open(directory / "pack")
    save_predictors(pack.path / NAME, list(exact_predictors(pack).values()))
    return pack


def _texts(pack: Pack) -> tuple[I32, I32]:
    """Split the text: three quarters for training and the rest for measuring, each `[sequences, CONTEXT]`."""
    from tokenizers import Tokenizer

    tokens = cut_sequences(Tokenizer.from_file(str(pack.tokenizer_file)).encode(TEXT.read_text()).ids, CONTEXT)
    return tokens[: 3 * len(tokens) // 4], tokens[3 * len(tokens) // 4 :]


def _used(pack: Pack, tokens: I32) -> NeuronProfile:
    return profile_model(pack, tokens, open_kernels(), silent)


def _read(pack: Pack, cache: Path, asked: list[list[int]], gap: int) -> RecordStats:
    """Generate the answers one after the other, and return the counts of the reads that they needed."""

    def nothing_resident(case: Case) -> tuple[Budget, DiskSpeed]:
        budget, speed = case.budget(*case.host_part(None))
        return replace(budget, placement=replace(budget.placement, resident=frozenset()), total=1 << 40), speed

    def decided(case: Case) -> Candidate[RecordPlan] | None:
        found = read_by_neuron(case)
        assert found is not None, "this model has no records"
        layers = found.details.layers.items()
        few = {at: replace(one, slots=int(SLOTS * one.neurons) // 32 * 32) for at, one in layers}
        return replace(found, details=replace(found.details, gap=gap, layers=few))

    with (
        patch.object(Case, "host_budget", property(nothing_resident)),
        patch.object(neurons, "read_by_neuron", decided),
    ):
        made = in_process_deployment(
            pack, [1.0], cache / f"{pack.path.name}-{gap}", context=CONTEXT, pool=16, sparsity="static",
            scheduler="window", memory=1 << 30, predictors=load_predictors(pack.path / NAME),
        )  # fmt: skip
    with closing(made) as deployment:
        for prompt in asked:
            answers(deployment, [prompt], ANSWER)
        sparse = deployment.node.sparse
        assert sparse is not None
        assert sparse.records is not None
        return sparse.records.stats()


def _busiest(use: NeuronProfile, orders: Any) -> float:
    counts = (use if orders is None else renumbered_profile(use, orders)).counts
    return load_imbalance(counts, [(32 * part.first, 32 * part.last) for part in deal(use.neurons // 32, [1, 1, 1])])


def _row(name: str, gap: int, runs: float, stats: RecordStats) -> Row:
    return {
        "numbers": name,
        "KiB read along": gap // 1024,
        "runs of a token's active neurons": runs,
        "reads a step": stats.reads / stats.tokens,
        "KiB read a step": stats.read_bytes / stats.tokens / 1024,
        "found in memory": stats.hit_rate,
    }


def _checks(found: dict[tuple[str, int], RecordStats]) -> Iterator[Check]:
    for gap in GAPS:
        less = found["renumbered", gap].reads / found["own", gap].reads
        yield Check(f"reads, renumbered over own, {gap >> 10} KiB read along", less, LESS, at_most=True)

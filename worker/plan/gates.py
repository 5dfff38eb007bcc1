"""Checks of blocks in a plan whose neurons are chosen by their gates, which are computed first."""

from collections.abc import Iterator

from tpi.config import ModelConfig
from tpi.errors import PlanError
from tpi.net.messages import Assign, BlockPlan, GatePlan
from tpi.pack.layout import RunName
from tpi.partition import FFN_UNIT
from worker.plan.node_plan import NodePlan

GATE_FIRST: list[RunName] = ["gate", "neuron"]  # the runs of a block that is computed gate first


def gate_parts(together: str) -> dict[str, str]:
    """Return the parts of each run of a gate-first block; `together` are the parts of a block with one run."""
    return {"gate": "gate", "neuron": together.removeprefix("gate ")}


def gate_faults(assign: Assign) -> Iterator[str | None]:
    """Yield what is wrong with gate-first blocks and with their thresholds, for `worker.plan.checks`."""
    if len({one.layer for one in assign.gates}) < len(assign.gates):
        yield "a layer has its gates' thresholds twice"
    if assign.gates and assign.predictors:
        yield "it has both predictors of neurons and thresholds of gates"
    for block in assign.blocks:
        yield _block_fault(assign, block)
    for one in assign.gates:
        yield _fault(assign, one)


def refuse_gates(plan: NodePlan, name: str) -> None:
    """Refuse a plan with gate-first blocks on a node with the accelerator called `name`.

    Raises:
        PlanError: if `plan` has such blocks, which only the CPU can compute.
    """
    if any(run.name == "gate" for block in plan.blocks for run in block.runs):
        raise PlanError(
            f"this pack chooses neurons by their gates, which only the CPU can do, but this node also uses {name}; "
            "use --device cpu, or the ordinary pack"
        )


def _block_fault(assign: Assign, block: BlockPlan) -> str | None:
    if len(block.runs) != len(GATE_FIRST) or assign.layouts[block.runs[0].layout].name != "gate":
        return None
    gate, neuron = block.runs
    if (gate.first, gate.last) != (neuron.first, neuron.last):
        return f"a block has the gates of other neurons than its own {neuron.first} to {neuron.last}"
    if assign.layouts[neuron.layout].layout != "record" or not _separable(assign.config):
        return "a block with a run of gates must store neurons as records, and its activation must not mix gate and up"
    return None


def _separable(config: ModelConfig) -> bool:
    return config.gated and config.activation not in ("drelu", "swiglu_clamped")


def _fault(assign: Assign, one: GatePlan) -> str | None:
    block = assign.blocks[one.block]
    if not one.layer < len(assign.layers):
        return f"it has thresholds of gates for layer {one.layer}, which does not exist"
    ffn = [own for own in (assign.blocks[index] for index in assign.layers[one.layer].blocks) if own.kind == "ffn"]
    names = [assign.layouts[run.layout].name for own in ffn for run in own.runs]
    if names != GATE_FIRST:
        return f"layer {one.layer} has no gate that is computed first"
    run = ffn[0].runs[-1]
    first, last = (min(unit * FFN_UNIT, assign.config.intermediate) for unit in (run.first, run.last))
    if block.runs or [(vector.name, vector.length) for vector in block.vectors] != [("least", last - first)]:
        return f"the thresholds of layer {one.layer} are not one number for each of its {last - first} neurons"
    return None

"""Gates in a node's plan: what may be said of blocks that are computed gate first, and who can compute them."""

from collections.abc import Iterator

from tpi.config import ModelConfig
from tpi.errors import PlanError
from tpi.net.messages import Assign, BlockPlan, GatePlan
from tpi.pack.layout import RunName
from tpi.partition import FFN_UNIT
from worker.plan.node_plan import NodePlan

GATE_FIRST: list[RunName] = ["gate", "neuron"]  # the runs of such a block


def gate_parts(together: str) -> dict[str, str]:
    """The parts of its runs, where `together` are those of a block of one run."""
    return {"gate": "gate", "neuron": together.removeprefix("gate ")}


def gate_faults(assign: Assign) -> Iterator[str | None]:
    """What is wrong with blocks that are computed gate first, or with what is sent of them: `worker.plan.checks`."""
    if len({one.layer for one in assign.gates}) < len(assign.gates):
        yield "a layer has its gates' thresholds twice"
    if assign.gates and assign.predictors:
        yield "it has predictors of neurons, and thresholds of their gates, too"
    for block in assign.blocks:
        yield _block_fault(assign, block)
    for one in assign.gates:
        yield _fault(assign, one)


def refuse_gates(plan: NodePlan, name: str) -> None:
    """Raise a PlanError if `plan` is computed gate first: the accelerator called `name` does not know how."""
    if any(run.name == "gate" for block in plan.blocks for run in block.runs):
        raise PlanError(
            f"neurons that are chosen by their gate are computed on the CPU alone, and this node has {name} beside it; "
            "use --device cpu, or the ordinary pack"
        )


def _block_fault(assign: Assign, block: BlockPlan) -> str | None:
    if len(block.runs) != len(GATE_FIRST) or assign.layouts[block.runs[0].layout].name != "gate":
        return None
    gate, neuron = block.runs
    if (gate.first, gate.last) != (neuron.first, neuron.last):
        return f"a block has the gates of other neurons than its own {neuron.first} to {neuron.last}"
    if assign.layouts[neuron.layout].layout != "record" or not _separable(assign.config):
        return "a block with a gate of its own has other neurons than records, or an activation of gate and up together"
    return None


def _separable(config: ModelConfig) -> bool:
    return config.gated and config.activation not in ("drelu", "swiglu_clamped")


def _fault(assign: Assign, one: GatePlan) -> str | None:
    block = assign.blocks[one.block]
    if not one.layer < len(assign.layers):
        return f"there is no layer {one.layer} to leave neurons out of"
    ffn = [own for own in (assign.blocks[index] for index in assign.layers[one.layer].blocks) if own.kind == "ffn"]
    names = [assign.layouts[run.layout].name for own in ffn for run in own.runs]
    if names != GATE_FIRST:
        return f"layer {one.layer} has no gate that is computed first"
    run = ffn[0].runs[-1]
    first, last = (min(unit * FFN_UNIT, assign.config.intermediate) for unit in (run.first, run.last))
    if block.runs or [(vector.name, vector.length) for vector in block.vectors] != [("least", last - first)]:
        return f"what is sent of the gates of layer {one.layer} is not a number for each of {last - first} neurons"
    return None

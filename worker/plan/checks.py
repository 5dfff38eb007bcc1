"""Checks of a plan and of a step that a master sent, before a worker uses them.

A message that decodes may still contain any numbers, and the kernels trust them as bounds of memory. For example, a
query head whose KV head is missing would read other memory. So each number is compared with the others and with
limits before anything is fetched or computed. A master of the same version passes all checks.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise

from allreduce.base import group_names
from allreduce.stages import MOST_STAGES
from tpi.config import RECURRENT, BlockKind, ModelConfig
from tpi.errors import PlanError
from tpi.net.fields import Card
from tpi.net.messages import Assign, BlockPlan, NodeOptions, Step
from tpi.net.wire import wire_names
from tpi.pack.layout import (
    STACKED_NORMS,
    RunLayout,
    RunName,
    RunShape,
    attention_parts,
    attention_shapes,
    per_layer_vectors,
    recurrent_shapes,
    recurrent_vectors,
)
from tpi.partition import FFN_UNIT
from worker.node_plan import HALVES, node_plan
from worker.plan.blocks import (
    attention_vectors,
    expert_ranges_fault,
    expert_runs,
    expert_vectors,
    has_matching_kv_units,
    holds_key_heads,
    lacks_latent,
    lacks_of_heads,
    settings_fault,
)
from worker.plan.predictors import predictor_faults

_MOST = 1 << 24  # for any dimension of a model, and for tokens
_MOST_LAYERS = 4096
_MOST_BLOCKS = 16  # per layer
_MOST_NODES = 256
_LONGEST_WAIT_S = 86_400.0

Fault = str | None


def check_assign(assign: Assign, card: Card | None = None) -> None:
    """Refuse a plan that contradicts itself or needs more memory than `assign.options` allow.

    Args:
        assign: the plan.
        card: the accelerators of this node, if it has any.

    Raises:
        PlanError: if the plan is refused; names the fault, or the amount of memory that would suffice.
    """
    for fault in _faults(assign):
        if fault:
            raise PlanError(f"the master's plan cannot be run: {fault}; use the same version of tpi on all nodes")
    from worker.plan.choose import check  # here, because a worker without a plan uses no planner

    check(node_plan(assign), card=card)


def check_step(step: Step, hidden: int, longest: int, first: bool, per_layer: int = 0) -> None:
    """Refuse a step whose hidden states have the wrong shape, or that is too long.

    Args:
        step: the step that the master sent.
        hidden: the hidden size of the model.
        longest: the largest number of tokens, and of sequences, that this node computes at once.
        first: True for a node of the first stage, which alone gets hidden states with a step.
        per_layer: the number of values that the embeddings of all layers have together.

    Raises:
        PlanError: if the step is refused; names the fault.
    """
    tokens, (rows, width) = step.tokens, step.x.shape
    expected = tokens if first else 0
    if rows != expected:
        raise PlanError(f"a step of {tokens} tokens has {rows} rows of hidden states, but this node expects {expected}")
    if tokens > longest or len(step.entries) > longest:
        raise PlanError(
            f"a step has {tokens} tokens in {len(step.entries)} sequences, but this node computes at most {longest}"
        )
    if width != hidden:
        raise PlanError(f"a step has hidden states of {width} values, but the plan says {hidden}")
    size, found = step.per_layer.size, len(step.per_layer)
    if size != tokens * per_layer or (size and found != tokens):
        raise PlanError(f"a step has per-layer embeddings of shape {step.per_layer.shape}, not {(tokens, per_layer)}")
    if any(entry.count < 1 for entry in step.entries):
        raise PlanError("a step names a sequence of which it has no tokens")


def _faults(assign: Assign) -> Iterator[Fault]:
    """Yield a message for each fault in a plan, or None for each passed check.

    Each check relies on the ones before it, so stop at the first fault.
    """
    yield from _config_faults(assign.config)
    yield from _option_faults(assign.options)
    yield from _group_faults(assign)
    yield from _block_faults(assign)
    yield from predictor_faults(assign)
    for layer in assign.layers:
        number = layer.number
        attention = [assign.blocks[index] for index in layer.blocks if assign.blocks[index].kind == "attention"]
        yield _if(
            not all(has_matching_kv_units(assign, number, block) for block in attention),
            f"layer {number} lacks KV heads that its query heads read",
        )
        recurrent = [assign.blocks[index] for index in layer.blocks if assign.blocks[index].kind in RECURRENT]
        yield _if(bool(recurrent) != assign.config.is_recurrent(number), f"layer {number} is of the wrong kind")
        yield _if(
            not all(holds_key_heads(assign, block) for block in recurrent),
            f"layer {number} lacks key heads that its value heads need",
        )


def _config_faults(config: ModelConfig) -> Iterator[Fault]:
    for name in ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab"):
        yield _outside(name, getattr(config, name), 1, _MOST)
    yield _outside("context", config.context, 1, 2**31 - 1)
    yield _outside("layers", config.layers, 1, _MOST_LAYERS)
    yield _if(config.heads % config.kv_heads != 0, f"{config.heads} heads cannot share {config.kv_heads} KV heads")
    yield _if(len(config.windows) not in (0, config.layers), "it does not have one window per layer")
    yield settings_fault(config)
    for window in config.windows:
        yield _outside("window", window, 0, 2**31 - 1)
    yield _outside("position_offset", config.position_offset, -1, _MOST)
    for name in ("norm_eps", "attention_scale", "rope_scale", "embed_scale", "attention_softcap", "logit_softcap"):
        yield _if(not math.isfinite(getattr(config, name)), f"{name} is not finite")
    yield _if(not 0 <= config.norm_eps <= 1, f"norm_eps is {config.norm_eps}")
    yield _if(config.attention_softcap < 0 or config.logit_softcap < 0, "a softcap is negative")
    yield _if(not all(map(math.isfinite, config.inv_freq)), "inv_freq is not finite")


def _option_faults(options: NodeOptions) -> Iterator[Fault]:
    for name in ("context", "pages", "prefill_tokens"):
        yield _outside(name, getattr(options, name), 1, _MOST)
    yield _if(not 0 < options.timeout_s <= _LONGEST_WAIT_S, f"timeout_s is {options.timeout_s}")
    if (batch := options.batch) is not None:
        yield _outside("batch", batch.batch, 1, _MOST)
        yield _outside("micro_batches", batch.micro_batches, 1, batch.batch)
        yield _outside("chunk", batch.chunk, 1, options.prefill_tokens)


def _group_faults(assign: Assign) -> Iterator[Fault]:
    yield _outside("size", assign.size, 2, _MOST_NODES)
    yield _if(assign.rank == 0, "it gives this worker rank 0, which is the master's")
    yield _if(
        [peer.rank for peer in assign.peers] != list(range(assign.size)), "it does not list one peer for each rank"
    )
    yield _if(not all(peer.address for peer in assign.peers[1:]), "a peer has no address")
    yield _if(assign.collective not in group_names(), f"collective is {assign.collective!r}")
    yield _if(assign.wire not in wire_names(), f"wire is {assign.wire!r}")
    yield from _stage_faults(assign)


def _stage_faults(assign: Assign) -> Iterator[Fault]:
    """Yield a message for each fault in a plan's stages.

    Together the stages must hold every layer once, in order. A node that is in several stages must be alone in each.
    """
    stages = assign.stages
    yield _outside("the number of stages", len(stages), 1, MOST_STAGES)
    ends = [0, *(stage.last for stage in stages)]
    tiled = [stage.first for stage in stages] == ends[:-1] and sorted(set(ends)) == ends
    yield _if(not tiled or ends[-1] != assign.config.layers, "its stages do not hold every layer once, in order")
    ordered = all(stage.ranks and list(stage.ranks) == sorted(set(stage.ranks)) for stage in stages)
    yield _if(not ordered, "a stage has no node, or a node twice")
    ranks = [rank for stage in stages for rank in stage.ranks]
    shared = {rank for stage in stages if len(stage.ranks) > 1 for rank in stage.ranks}
    yield _if(
        any(ranks.count(rank) > 1 for rank in shared), "a node of a stage of several nodes is in another one, too"
    )
    adjacent = any(one.ranks == after.ranks for one, after in pairwise(stages))
    yield _if(adjacent, "two stages in a row have the same node")
    own = [layer for stage in stages if assign.rank in stage.ranks for layer in range(stage.first, stage.last)]
    yield _if(
        [layer.number for layer in assign.layers] != own, "it lists other layers than those of this node's stages"
    )


def _block_faults(assign: Assign) -> Iterator[Fault]:
    config = assign.config
    used = {index for layer in assign.layers for index in layer.blocks}
    used |= {one.block for one in assign.predictors}
    yield _if(sorted(used) != list(range(len(assign.blocks))), "it has blocks that no layer uses")
    yield _if(len({block.id for block in assign.blocks}) < len(assign.blocks), "it has a block twice")
    runs: dict[BlockKind, Mapping[RunName, RunShape]]
    runs = {"attention": {}, "ffn": {}, **expert_runs(config), **recurrent_shapes(config)}
    gated = "gate up down" if config.gated else "up down"
    attention = {name: " ".join(names) for name, names in attention_parts(config).items()}
    parts = {**attention, "value": "v gate o" if config.state_heads else "v input gate o", "key": "q k",
             "neuron": gated, "shared": gated}  # fmt: skip
    kinds = {block.kind for block in assign.blocks}
    halves = {HALVES.get(kind, kind) for kind in kinds}
    yield _if(
        (assign.layers and "attention" not in halves) or not kinds <= runs.keys(),
        f"its blocks are {' and '.join(sorted(kinds))}, not attention and feed-forward",
    )
    for layer in assign.layers:
        blocks = [assign.blocks[index] for index in layer.blocks]
        own = config.at_layer(layer.number)
        runs |= {
            "attention": attention_shapes(own),
            "ffn": {"neuron": RunShape(own.intermediate, FFN_UNIT, own.hidden)},
        }
        yield from _layer_faults([block.kind for block in blocks], config.parallel_experts)
        ends = {vector.name for vector in blocks[-1].vectors}
        yield _if(not per_layer_vectors(config).keys() <= ends, "a layer lacks the vectors for its embedding")
        for block in blocks:
            layouts = [assign.layouts[run.layout] for run in block.runs]
            names = [layout.name for layout in layouts]
            if block.kind == "experts":
                yield expert_ranges_fault(names, block)
                names = [name for name, _ in groupby(names)]
            wanted = runs[block.kind]
            yield _if(names != list(wanted), f"a block of kind {block.kind} has the runs {names}")
            for layout in layouts:
                yield _layout_fault(layout, wanted[layout.name], parts[layout.name])
            yield from _vector_faults(block, own)


def _layer_faults(kinds: Sequence[BlockKind], parallel_experts: bool) -> Iterator[Fault]:
    """Yield a message for each fault in the kinds of a layer's blocks.

    Only the first block may be attention, because each layer has one set of KV pages.
    """
    yield _outside("the number of a layer's blocks", len(kinds), 1, _MOST_BLOCKS)
    wanted = not parallel_experts or tuple(kinds[1:]) == ("ffn", "experts")
    yield _if(not wanted, f"a layer has the blocks {', '.join(kinds)}, not attention, ffn and experts")
    yield _if(
        not ({"attention"} | RECURRENT).isdisjoint(kinds[1:]), "a layer has attention elsewhere than in its first block"
    )


def _layout_fault(layout: RunLayout, wanted: RunShape, parts: str) -> Fault:
    """Return a message about a fault in a run's layout, or None.

    A unit must be whole heads, or `FFN_UNIT` neurons, and have the parts named in `parts`. All units together must have
    `wanted.vectors` vectors, rounded up to whole units.
    """
    name, step, vectors = layout.name, wanted.step, wanted.vectors or 0
    widths = range(step, (_MOST if name in ("query_up", "query", "kv", "value", "key") else step) + 1, step)
    if layout.hidden != wanted.hidden or layout.width not in widths:
        return f"{name} has units of {layout.width} vectors of {layout.hidden} values"
    if " ".join(part.name for part in layout.parts) != parts:
        return f"{name} has units with other parts than {parts}"
    if any(part.axis != ("column" if part.name in ("o", "down") else "row") for part in layout.parts):
        return f"a part of {name} lies along the wrong axis"
    if not 0 <= layout.units * layout.width - vectors < layout.width:
        return f"{name} has {layout.units} units of {layout.width} vectors each, which do not fit its {vectors} vectors"
    return None


def _vector_faults(block: BlockPlan, config: ModelConfig) -> Iterator[Fault]:
    lengths = attention_vectors(config) | {
        "norm": config.hidden, "norm.bias": config.hidden, "post_norm": config.hidden, "down.bias": config.hidden,
        "gate.bias": config.intermediate, "up.bias": config.intermediate, "layer_scale": 1,
    }  # fmt: skip
    lengths |= per_layer_vectors(config)
    if block.kind == "experts":
        lengths |= expert_vectors(config)
    wanted = recurrent_vectors(config, block.kind)
    lengths |= wanted
    longest = max(*lengths.values(), config.head_dim)
    names = [vector.name for vector in block.vectors]
    lacking = config.input_norm != ("norm" in names) or (block.kind == "experts" and "router" not in names)
    lacking |= block.kind == "attention" and lacks_latent(config, names)
    lacking |= config.parallel_experts and block.kind == "experts" and not {*STACKED_NORMS} <= {*names}
    lacking |= block.kind in RECURRENT and lacks_of_heads(wanted, names)
    yield _if(len(set(names)) < len(names) or lacking, f"the vectors of a block are {', '.join(names)}")
    for vector in block.vectors:
        known = lengths.get(vector.name)
        wrong = vector.length > longest if known is None else vector.length != known
        yield _if(wrong, f"vector {vector.name} has {vector.length} values, which is a wrong number")


def _outside(name: str, value: int, low: int, high: int) -> Fault:
    return None if low <= value <= high else f"{name} is {value}, but must be from {low} to {high}"


def _if(wrong: bool, fault: str) -> Fault:
    return fault if wrong else None

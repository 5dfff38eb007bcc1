"""Checks of the runs and vectors of blocks in a plan from the master.

`worker.plan.checks` calls these functions.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from tpi.config import BlockKind, ModelConfig
from tpi.errors import ModelError
from tpi.families.checks import check_heads, check_latent, check_mixture, check_recurrent
from tpi.net.messages import Assign, BlockPlan
from tpi.pack.layout import WHOLE_RUNS, RunName, RunShape, ffn_units
from tpi.partition import FFN_UNIT, Range, kv_range


def attention_vectors(config: ModelConfig) -> dict[str, int]:
    """Return the number of values of each vector, by name, that an attention block may have besides its norms."""
    heads, kv_heads = config.heads * config.head_dim, config.kv_heads * config.head_dim
    found = {
        "o.bias": config.hidden, "q.bias": heads, "k.bias": kv_heads, "v.bias": kv_heads, "q_norm.whole": heads,
        "k_norm.whole": kv_heads, "sinks": config.heads,
    }  # fmt: skip
    if config.latent is not None:
        found |= {"latent.norm": config.latent.rank, "latent.bias": config.latent_values}
    if config.query_rank:
        found |= {"q_latent.norm": config.query_rank, "q_latent.bias": config.query_rank}
    return found


def has_matching_kv_units(assign: Assign, layer: int, attention: BlockPlan) -> bool:
    """Return True if the node's KV units of a layer's attention are exactly the units that its query units attend to.

    In a model with latent attention, the node must also have all units of the latent runs, and the rows of the run
    `query_up` that its queries need. A node without query units must have no KV units.
    """
    config = assign.config.at_layer(layer)
    runs = {assign.layouts[run.layout].name: (assign.layouts[run.layout], run) for run in attention.runs}
    if config.shared_kv:
        found = [one for one in assign.layers if one.number == assign.config.kv_layer(layer)]
        if not found:
            return False
        first = assign.blocks[found[0].blocks[0]]
        source = {assign.layouts[run.layout].name: (assign.layouts[run.layout], run) for run in first.runs}
        mine, theirs = ((layout.width, run.first, run.last) for layout, run in (runs["query"], source["query"]))
        return mine == theirs
    (query, wanted), (kv, held) = runs["query"], runs["kv"]
    heads, kv_heads = query.width // config.head_dim, kv.width // config.kv_width
    own = Range(wanted.first, wanted.last)
    for layout, latent in (runs[name] for name in WHOLE_RUNS if name in runs):
        if (latent.first, latent.last) != (0, layout.units if len(own) else 0):
            return False
    up, rows = runs.get("query_up", (query, wanted))
    if (up.width, rows.first, rows.last) != (query.width, wanted.first, wanted.last):
        return False
    return Range(held.first, held.last) == kv_range(own, heads, kv_heads, config.heads, config.kv_heads)


def holds_key_heads(assign: Assign, block: BlockPlan) -> bool:
    """Return True if the node has exactly the key heads that its value heads need, in a block with states.

    A block with states is recurrent: its layer has a state instead of keys and values.
    """
    heads = assign.config.state_heads
    if heads is None:  # a short convolution has no key heads
        return True
    runs = {assign.layouts[run.layout].name: (assign.layouts[run.layout], run) for run in block.runs}
    (values, wanted), (keys, held) = runs["value"], runs["key"]
    own = Range(wanted.first, wanted.last)
    needed = kv_range(own, values.width // heads.value, keys.width // heads.key, heads.heads, heads.key_heads)
    return Range(held.first, held.last) == needed


def lacks_latent(config: ModelConfig, names: list[str]) -> bool:
    """Return True if an attention block lacks the norm of a latent vector that the model has.

    `names` are the names of the block's vectors.
    """
    wanted = {"latent.norm": config.latent, "q_latent.norm": config.query_rank}
    return any(there and name not in names for name, there in wanted.items())


def lacks_of_heads(wanted: Collection[str], names: list[str]) -> bool:
    """Return True if a block with states lacks a vector that it needs.

    It needs each of `wanted`, with two exceptions: one of `decay` and `decay.log` is enough, and the biases of
    convolutions may all be absent.

    Args:
        wanted: the names of all vectors that such a block may have.
        names: the names of the vectors that the block has.
    """
    biases = {name for name in wanted if name.endswith(".bias") and name != "decay.bias"}
    optional = {"decay", "decay.log"} | (set() if biases & {*names} else biases)
    decays = "decay" not in wanted or not {"decay", "decay.log"}.isdisjoint(names)
    return not {*wanted} - optional <= {*names} or not decays


def expert_runs(config: ModelConfig) -> dict[BlockKind, Mapping[RunName, RunShape]]:
    """Return the shapes of an expert block's runs, under the key "experts"; an empty dict if the model has none."""
    mixture = config.mixture
    if mixture is None:
        return {}
    shared: dict[RunName, RunShape] = {"shared": RunShape(mixture.shared, FFN_UNIT, config.hidden)}
    routed = RunShape(mixture.experts * ffn_units(mixture.width) * FFN_UNIT, FFN_UNIT, config.hidden)
    return {"experts": (shared if mixture.shared else {}) | {"neuron": routed}}


def expert_vectors(config: ModelConfig) -> dict[str, int]:
    """Return the number of values of each vector, by name, that a block of experts may have besides its norms."""
    assert config.mixture is not None  # `expert_runs` allows no such block without it
    experts, width = config.mixture.experts, config.mixture.width
    return {
        "router": experts * config.hidden,
        "router.bias": experts,
        "router.choice": experts,
        "router.norm": config.hidden,
        "router.factors": experts,
        "shared.scale": config.hidden,
        "gate.biases": experts * width,
        "up.biases": experts * width,
        "down.biases": experts * config.hidden,
    }


def settings_fault(config: ModelConfig) -> str | None:
    """Return a message about a fault in the model's settings of experts or latent attention, or None."""
    try:
        if config.mixture is not None:
            check_mixture(config.mixture, "the model")
        if config.latent is not None:
            check_latent(config.latent, config, "the model")
        check_recurrent(config, "the model")
        check_heads(config, "the model")
    except ModelError as error:
        return str(error)
    return None


def expert_ranges_fault(names: Sequence[str], block: BlockPlan) -> str | None:
    """Return a message about a fault in a block of experts' ranges, or None; `names` are the names of its runs.

    Ranges of one run must have the same layout, be in order and not overlap.
    """
    for (one, name), (other, following) in pairwise(zip(block.runs, names, strict=True)):
        if name == following and (one.layout != other.layout or one.last > other.first):
            return f"expert units {other.first} to {other.last} must not follow units {one.first} to {one.last}"
    return None

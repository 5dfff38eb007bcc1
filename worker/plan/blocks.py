"""What a plan may say of attention and of experts: see `worker.plan.checks`."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from tpi.config import BlockKind, ModelConfig
from tpi.errors import ModelError
from tpi.families.checks import check_latent, check_mixture
from tpi.net.messages import Assign, BlockPlan
from tpi.pack.layout import RunName, RunShape, ffn_units
from tpi.partition import FFN_UNIT, Range, kv_range


def attention_vectors(config: ModelConfig) -> dict[str, int]:
    """The lengths of the vectors that such a block has beside a norm."""
    heads, kv_heads = config.heads * config.head_dim, config.kv_heads * config.head_dim
    found = {
        "o.bias": config.hidden, "q.bias": heads, "k.bias": kv_heads, "v.bias": kv_heads, "q_norm.whole": heads,
        "k_norm.whole": kv_heads, "sinks": config.heads,
    }  # fmt: skip
    if config.latent is not None:
        found |= {"latent.norm": config.latent.rank, "latent.bias": config.latent_values}
    return found


def holds_keys(assign: Assign, attention: BlockPlan) -> bool:
    """Whether the node's KV units are exactly those that its query units attend to; and what they come from, if keys
    and values come from a latent vector."""
    config = assign.config
    runs = {assign.layouts[run.layout].name: (assign.layouts[run.layout], run) for run in attention.runs}
    (query, wanted), (kv, held) = runs["query"], runs["kv"]
    heads, kv_heads = query.width // config.head_dim, kv.width // config.kv_width
    own = Range(wanted.first, wanted.last)
    if "latent" in runs:
        layout, latent = runs["latent"]
        if (latent.first, latent.last) != (0, layout.units if len(own) else 0):
            return False
    return Range(held.first, held.last) == kv_range(own, heads, kv_heads, config.heads, config.kv_heads)


def lacks_latent(config: ModelConfig, names: list[str]) -> bool:
    """Whether an attention block with vectors of these names has no norm of its latent vector, and needs one."""
    return config.latent is not None and "latent.norm" not in names


def expert_runs(config: ModelConfig) -> dict[BlockKind, Mapping[RunName, RunShape]]:
    """The runs of a block of experts. Empty if there are none."""
    mixture = config.mixture
    if mixture is None:
        return {}
    shared: dict[RunName, RunShape] = {"shared": RunShape(mixture.shared, FFN_UNIT, config.hidden)}
    routed = RunShape(mixture.experts * ffn_units(mixture.width) * FFN_UNIT, FFN_UNIT, config.hidden)
    return {"experts": (shared if mixture.shared else {}) | {"neuron": routed}}


def expert_vectors(config: ModelConfig) -> dict[str, int]:
    """The lengths of the vectors that such a block has beside a norm."""
    assert config.mixture is not None  # there are no runs without it
    experts, width = config.mixture.experts, config.mixture.width
    return {
        "router": experts * config.hidden,
        "router.bias": experts,
        "router.choice": experts,
        "shared.scale": config.hidden,
        "gate.biases": experts * width,
        "up.biases": experts * width,
        "down.biases": experts * config.hidden,
    }


def settings_fault(config: ModelConfig) -> str | None:
    """What is wrong with the settings of experts, or of a latent vector, if anything is."""
    try:
        if config.mixture is not None:
            check_mixture(config.mixture, "it")
        if config.latent is not None:
            check_latent(config.latent, config, "it")
    except ModelError as error:
        return str(error)
    return None


def slices_fault(names: Sequence[str], block: BlockPlan) -> str | None:
    """Ranges of one run, whose names are `names`, have one layout and follow one another without touching."""
    for (one, name), (other, following) in pairwise(zip(block.runs, names, strict=True)):
        if name == following and (one.layout != other.layout or one.last > other.first):
            return f"units {other.first} to {other.last} of its experts follow {one.first} to {one.last}"
    return None

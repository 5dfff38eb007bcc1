"""What a plan may say of attention: see `worker.plan.checks`."""

from tpi.config import ModelConfig
from tpi.errors import ModelError
from tpi.families.checks import check_latent
from tpi.net.messages import Assign, BlockPlan
from tpi.partition import Range, kv_range


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


def latent_fault(config: ModelConfig) -> str | None:
    """What is wrong with the settings of a latent vector, if anything is."""
    if config.latent is None:
        return None
    try:
        check_latent(config.latent, config, "it")
    except ModelError as error:
        return str(error)
    return None


def lacks_latent(config: ModelConfig, names: list[str]) -> bool:
    """Whether an attention block with vectors of these names has no norm of its latent vector, and needs one."""
    return config.latent is not None and "latent.norm" not in names

"""The mean layer of a model: its bytes, its weights, and the bytes that cross between devices.

Bytes refer to the packed format; each weight is multiplied and added once per token that uses it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.model.machine import Number
from tpi.config import RECURRENT, ModelConfig
from tpi.kernels.kv import KvDtype, vector_bytes
from tpi.pack.layout import BlockKind, RunLayout

_F32 = 4  # bytes of an activation
_PAIR = 4  # operations of a token with a token that it attends to, per head and dimension


@dataclass(frozen=True)
class LayerShape:
    """The mean layer of a node.

    Attributes:
        layers: number of layers.
        attention_bytes, attention_weights: of the products before and after attention.
        ffn_bytes, ffn_weights: of the neurons that every token uses: a dense model's neurons, or the shared experts.
        routed_bytes, routed_weights: of all routed experts together.
        experts: number of routed experts.
        used: number of routed experts that a token uses.
        kv_token: bytes of the keys and values of one token, in the format `kv_dtype`.
        pair: operations of attention for one token and one earlier token that it attends to.
        hidden: bytes of one token's hidden state.
        heads: bytes of one token's queries, keys and values.
        mixed: bytes of one token's result of attention.
        kv_dtype: format of keys and values.
        windows: the most tokens that each layer attends to, 0 for all of them. An empty tuple means that every layer
            attends to all tokens. Pages hold all tokens in any case.
    """

    layers: int
    attention_bytes: float
    attention_weights: float
    ffn_bytes: float
    ffn_weights: float
    routed_bytes: float = 0.0
    routed_weights: float = 0.0
    experts: int = 1
    used: int = 1
    kv_token: float = 0.0
    pair: float = 0.0
    hidden: float = 0.0
    heads: float = 0.0
    mixed: float = 0.0
    kv_dtype: KvDtype = "f16"
    windows: tuple[int, ...] = ()

    def attended(self, tokens: float) -> float:
        """Return how many of `tokens` earlier tokens a token attends to, as the mean of all layers."""
        if not self.windows:
            return tokens
        return sum(min(tokens, window or tokens) for window in self.windows) / len(self.windows)

    @property
    def sharers(self) -> float:
        """Number of query heads that share a key and value head."""
        return 2 * self.mixed / (self.heads - self.mixed) if self.heads > self.mixed else 1.0

    @property
    def nbytes(self) -> float:
        """Number of bytes of all weights of the layer."""
        return self.attention_bytes + self.feed_forward_bytes

    @property
    def feed_forward_bytes(self) -> float:
        """Number of bytes of all neurons of the layer."""
        return self.ffn_bytes + self.routed_bytes

    def touched(self, tokens: Number) -> Number:
        """Return the bytes of neurons that `tokens` tokens read together, if each chooses its experts at random."""
        missed = (1 - self.used / self.experts) ** tokens
        return self.ffn_bytes + self.routed_bytes * (1 - missed)

    @property
    def token_weights(self) -> float:
        """Number of the neurons' weights that one token is multiplied with."""
        return self.ffn_weights + self.routed_weights * self.used / self.experts


Runs = Iterable[tuple[BlockKind, RunLayout, int]]
"""The runs of all blocks of a node: the block's kind, the run's layout, and how many of its units the node has."""


def layer_shape(config: ModelConfig, runs: Runs, heads: int, kv_heads: int, kv_dtype: KvDtype) -> LayerShape:
    """Return the mean layer of a node with `heads` query heads and `kv_heads` key and value heads.

    `runs` are the runs of units of all of the node's blocks.
    """
    sums = dict.fromkeys(("attention", "ffn", "routed"), (0.0, 0.0))
    for kind, run, units in runs:
        of = (
            "attention"
            if kind == "attention" or kind in RECURRENT
            else "routed"
            if kind == "experts" and run.name != "shared"
            else "ffn"
        )
        nbytes, weights = sums[of]
        sums[of] = nbytes + units * run.unit_bytes, weights + units * run.width * run.hidden * len(run.parts)
    count = config.layers
    means = {of: (nbytes / count, weights / count) for of, (nbytes, weights) in sums.items()}
    mixture = config.mixture
    dim = config.head_dim
    return LayerShape(
        count,
        *means["attention"],
        *means["ffn"],
        *means["routed"],
        experts=mixture.experts if mixture else 1,
        used=mixture.used if mixture else 1,
        kv_token=2 * kv_heads * vector_bytes(dim, kv_dtype),
        pair=_PAIR * heads * dim,
        hidden=_F32 * config.hidden,
        heads=_F32 * (heads + 2 * kv_heads) * dim,
        mixed=_F32 * heads * dim,
        kv_dtype=kv_dtype,
        windows=config.windows,
    )

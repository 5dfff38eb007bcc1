"""Upper bounds for the memory of the kernels in addition to weights and pages, for the memory budget."""

from collections.abc import Collection
from dataclasses import dataclass

from tpi.config import ModelConfig
from tpi.kernels.constants import PAGE_TOKENS, STREAM_TOKENS, slices
from tpi.pack.layout import GROUP, RunLayout, is_quantised

_CHUNK = 8 * PAGE_TOKENS  # positions that one work-group of a card attends to in a short step
_SPLITS = 32  # largest number of partial sums of a product with columns of records, in a short step


@dataclass(frozen=True)
class CardMemoryNeed:
    """Memory of a card's kernels in addition to weights, keys and values; in bytes."""

    token: int  # for each token of a step
    short: int = 0  # in addition, for each token of a step shorter than `STREAM_TOKENS`
    fixed: int = 0  # vectors of all blocks

    def nbytes(self, tokens: int) -> int:
        """Return the bytes for a step of `tokens` tokens, or any shorter one."""
        return self.fixed + max(tokens * self.token, min(tokens, STREAM_TOKENS - 1) * (self.token + self.short))


def card_memory_need(
    config: ModelConfig, units: tuple[int, int, int], runs: Collection[RunLayout], context: int, vectors: int
) -> CardMemoryNeed:
    """Return the memory that a card's kernels need for the given runs and `units`: local heads, KV heads and neurons.

    The memory holds a block's input, its rounded copy, and the largest of these sets of buffers, in float32 unless
    rounded:

    - the hidden states of a chain, and q, k and v as products and as heads;
    - the heads, their partial mixtures of values, and the mixture;
    - the heads, the mixture, its rounding, and the output;
    - gate, up, the rounding of their product, and the output.

    A chain does not hold a block's input any more when it holds the output and the hidden states.

    `tpi.devices.opencl.compute` has the code. `context` is the longest context in tokens, `vectors` the bytes of the
    blocks' vectors.
    """
    (heads, kv_heads, neurons), hidden = units, config.hidden
    query, kv = heads * config.head_dim, kv_heads * max(config.head_dim, config.kv_width)
    finished, mixing = 4 * (query + 2 * kv), 4 * heads * (config.head_dim + 2)
    spread = 4 * (query + kv)  # of keys in q4, and of their queries
    attended = (
        4 * hidden + 2 * finished,
        finished + spread + mixing + 4 * query,
        finished + 4 * query + _rounded(query, runs) + 4 * hidden,
    )
    passed = 8 * neurons + _rounded(neurons, runs) + 4 * hidden
    given = 4 * hidden + _rounded(hidden, runs) + 8 + 6 * heads  # with the tables of an `AttentionStep`
    records = any(run.layout == "record" for run in runs)
    short = max(mixing * -(-context // _CHUNK), 4 * _SPLITS * hidden if records else 0)
    return CardMemoryNeed(given + max(*attended, passed), short, vectors)


def _rounded(values: int, runs: Collection[RunLayout]) -> int:
    """Return the bytes of `values` activations rounded for products with `runs`: codes, scales and group sums."""
    quantised = [run.layout for run in runs for part in run.parts if is_quantised(part.format)]
    if "record" in quantised:
        return 4 * values
    fine = any(part.format == "q8" for run in runs for part in run.parts)
    return (1 + fine) * values + 8 * values // GROUP if quantised else 0


def buffer_bytes(config: ModelConfig, heads: int, kv_heads: int, neurons: int) -> int:
    """Return the bytes of buffers for one token of a step, for local head and neuron counts.

    Both kinds of block are counted together. In float32: q, rotated q, chunks and mixed values of a head, k, v, angles,
    latent vectors before and after their norms; products of gate and up. Quantised copies add a third.
    """
    attention = config.head_dim * (9 * heads // 2 + 2 * kv_heads + 1) + 3 * (config.latent_values + config.query_rank)
    return 4 * (max(attention, _recurrent(config, heads)) + 2 * neurons + _routed(config))


def _recurrent(config: ModelConfig, heads: int) -> int:
    """Return the number of values that heads with states need for one token.

    `heads` is the node's number of query heads in attention. The values are: products of q, k, v and gate; q, k and v
    after the convolution; results of the value heads, before and after the norm; two gates. Value heads are divided
    among nodes by the same shares as query heads, so a node may have one unit more than its exact share.
    """
    found = config.state_heads
    if found is None or not heads:
        return 0
    own = min(found.heads, -(-heads * found.heads // config.heads) + found.unit_heads)
    keys = min(found.key_heads, own)
    return own * (5 * found.value + 2) + 4 * keys * found.key


def _routed(config: ModelConfig) -> int:
    """Return the number of values that experts need for one token.

    They are: the token's input again for each expert that it uses, as floats and rounded; one expert's output; logits.
    """
    mixture = config.mixture
    if mixture is None:
        return 0
    pairs = mixture.used + (1 if mixture.shared else 0)
    return (2 * pairs + 1) * config.hidden + 2 * mixture.experts


def slice_bytes(hidden: int, threads: int) -> int:
    """Return the bytes of the buffers in which threads add up partial sums in a short step, for both kinds of block."""
    return 2 * slices(threads) * STREAM_TOKENS * hidden * 4

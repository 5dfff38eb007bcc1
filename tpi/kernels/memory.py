"""What the kernels keep in memory beside weights and pages: upper bounds, for the memory budget."""

from collections.abc import Collection
from dataclasses import dataclass

from tpi.config import ModelConfig
from tpi.kernels.constants import PAGE_TOKENS, STREAM_TOKENS, slices
from tpi.pack.layout import GROUP, RunLayout, is_quantised

_CHUNK = 8 * PAGE_TOKENS  # positions that a work-group of a card attends to, where a step is short
_SPLITS = 32  # parts of a short step's columns of records that are added afterwards, at most


@dataclass(frozen=True)
class CardRoom:
    """What kernels on a card have at once beside weights, keys and values; bytes."""

    token: int  # of each token of a step
    short: int = 0  # more, of each token of a step that is shorter than `STREAM_TOKENS`
    fixed: int = 0  # vectors of all blocks

    def nbytes(self, tokens: int) -> int:
        """Of a step of so many tokens, or of any shorter one."""
        return self.fixed + max(tokens * self.token, min(tokens, STREAM_TOKENS - 1) * (self.token + self.short))


def card_room(
    config: ModelConfig, units: tuple[int, int, int], runs: Collection[RunLayout], context: int, vectors: int
) -> CardRoom:
    """What kernels on a card take for local counts of heads, KV heads and neurons (`units`), and such runs.

    In float32, beside a block's input and its rounding: q, k and v as products and as heads; or heads, what work-groups
    mix of the values, and that together; or heads, what is mixed, its rounding and the output; or gate, up, their
    product's rounding and the output. `tpi.devices.opencl.compute` has the code. `context` is in tokens, `vectors` in
    bytes.
    """
    (heads, kv_heads, neurons), hidden = units, config.hidden
    query, kv = heads * config.head_dim, kv_heads * max(config.head_dim, config.kv_width)
    finished, mixing = 4 * (query + 2 * kv), 4 * heads * (config.head_dim + 2)
    spread = 4 * (query + kv)  # of q4 keys
    attended = (
        2 * finished,
        finished + spread + mixing + 4 * query,
        finished + 4 * query + _rounded(query, runs) + 4 * hidden,
    )
    passed = 8 * neurons + _rounded(neurons, runs) + 4 * hidden
    given = 4 * hidden + _rounded(hidden, runs) + 8 + 6 * heads  # with tables of who attends to what
    records = any(run.layout == "record" for run in runs)
    short = max(mixing * -(-context // _CHUNK), 4 * _SPLITS * hidden if records else 0)
    return CardRoom(given + max(*attended, passed), short, vectors)


def _rounded(values: int, runs: Collection[RunLayout]) -> int:
    """Bytes of so many values as products with these runs' weights want them: codes, scales and sums of groups."""
    quantised = [run.layout for run in runs for part in run.parts if is_quantised(part.format)]
    if "record" in quantised:
        return 4 * values
    fine = any(part.format == "q8" for run in runs for part in run.parts)
    return (1 + fine) * values + 8 * values // GROUP if quantised else 0


def buffer_bytes(config: ModelConfig, heads: int, kv_heads: int, neurons: int) -> int:
    """Bytes of buffers for one token of a step, for local head and neuron counts, of both kinds of block together.

    In float32: q, rotated q, chunks and mixed values of a head, k, v, angles, the latent vector as it is, and normed;
    products of gate and up. What is quantised on the way takes a third more.
    """
    attention = config.head_dim * (9 * heads // 2 + 2 * kv_heads + 1) + 3 * config.latent_values
    return 4 * (attention + 2 * neurons + _routed(config))


def neurons_passed(config: ModelConfig) -> int:
    """The most feed-forward neurons that a token passes in a block, on a node that has all of them."""
    mixture = config.mixture
    experts = mixture.used * mixture.width + mixture.shared if mixture else 0
    return max(config.intermediate, experts)


def _routed(config: ModelConfig) -> int:
    """Values that experts take for a token: its input once more for each that it uses, as floats and rounded, what one
    of them comes to, and logits."""
    mixture = config.mixture
    if mixture is None:
        return 0
    pairs = mixture.used + (1 if mixture.shared else 0)
    return (2 * pairs + 1) * config.hidden + 2 * mixture.experts


def slice_bytes(hidden: int, threads: int) -> int:
    """Bytes of the slices in which the threads of a short step sum, for both kinds of block."""
    return 2 * slices(threads) * STREAM_TOKENS * hidden * 4

"""What the kernels keep in memory beside weights and pages: upper bounds, for the memory budget."""

from tpi.config import ModelConfig
from tpi.kernels.constants import STREAM_TOKENS, slices


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

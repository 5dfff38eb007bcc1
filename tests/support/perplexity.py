"""The logits and the perplexity of a text, by a replay of the model on this machine."""

import numpy as np

from tpi.kernels import Kernels
from tpi.kernels.spec import NormSpec
from tpi.pack.reader import Pack
from tpi.sparsity.replay import F32, I32, FeedForward, dense, read_table, replay


def logits(pack: Pack, x: F32, kernels: Kernels) -> F32:
    """Return the logits `[tokens, vocab]` of hidden states that `replay` returned."""
    config, final = pack.config, pack.final.vectors()
    norm = NormSpec(config.norm, config.norm_eps, final["norm"], final.get("norm.bias"))
    found: F32 = kernels.logits(*read_table(pack.head), kernels.norm(norm, x))[:, : config.vocab]
    found *= np.float32(config.logit_scale)
    if not config.logit_softcap:
        return found
    return np.asarray(np.tanh(found / config.logit_softcap) * config.logit_softcap, np.float32)


def perplexity(pack: Pack, tokens: I32, kernels: Kernels, feed_forward: FeedForward = dense) -> float:
    """Return the perplexity of `tokens` `[sequences, length]`, over all tokens except the first of each sequence."""
    x = replay(pack, tokens, kernels, feed_forward).reshape(*tokens.shape, -1)
    surprise: list[F32] = []
    for states, sequence in zip(x, tokens, strict=True):
        found = logits(pack, np.ascontiguousarray(states[:-1]), kernels)
        found -= found.max(axis=1, keepdims=True)
        log_sum = np.log(np.exp(found).sum(axis=1))
        surprise.append(log_sum - found[np.arange(len(found)), sequence[1:]])
    return float(np.exp(np.mean(np.concatenate(surprise), dtype=np.float64)))

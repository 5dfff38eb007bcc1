"""Attention heads that contribute next to nothing, and could be left out as neurons are (PowerInfer-2, DejaVu).

The unit is a KV group: the query heads that share keys and values. A group's weight for a token is the length of its
contribution to the block's result, relative to the length of that result. A group whose weight is below its layer's
threshold is left out. The threshold is the largest at which the left-out part has at most a stated share of the
result's length. That is the root mean square over the tokens, with the layers before already cut (as in
`tpi.sparsity.thresholds` for neurons).

Contributions are only known after everything was computed, so this is an upper bound for any predictor. It decides
whether there is anything to predict: on the models that were measured there is not (docs/sparsity.md), and so no run
leaves heads out.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.kernels import Kernels
from tpi.kernels.spec import AttentionSpec
from tpi.pack.reader import Pack
from tpi.sparsity.replay import F32, I32, U8, replay
from tpi.sparsity.thresholds import DEFAULT_ERROR

Kept = npt.NDArray[np.bool_]
TOKENS = 512  # tokens that are measured: each group is multiplied with o separately
WORTH = 0.1  # share of the groups; with fewer, predicting them would take as long as computing them
_STEPS = 100  # how many shares of left-out groups are tried


@dataclass(frozen=True)
class LeftOut:
    """The result for one layer: the share of its groups that is left out, over all tokens, and the relative error."""

    share: float
    error: float


@dataclass(eq=False)
class HeadCut:
    """A `tpi.sparsity.replay.Heads` that leaves out the smallest contributions, within `error`.

    `layers` has the result for each layer.
    """

    kernels: Kernels
    error: float = DEFAULT_ERROR
    layers: list[LeftOut] = field(default_factory=list)

    @property
    def share(self) -> float:
        """The share of groups of all layers that is left out."""
        return float(np.mean([one.share for one in self.layers])) if self.layers else 0.0

    def __call__(self, layer: int, spec: AttentionSpec, data: U8, mixed: F32) -> F32:
        """Return `mixed` with zeros for the groups that are left out."""
        groups = np.arange(spec.kv_heads)[:, None] == np.repeat(spec.kv_index, spec.head_dim)
        parts = np.stack([self.kernels.output(spec, data, mixed * group) for group in groups], axis=1)
        kept, found = keep_most(parts, self.error)
        self.layers.append(found)
        return np.asarray(mixed * (kept @ groups), np.float32)


def keep_most(parts: F32, error: float) -> tuple[Kept, LeftOut]:
    """Return which groups to keep, `[tokens, groups]`, so that sums stay within `error`, and the result for the layer.

    `parts` `[tokens, groups, hidden]` are the contributions of the groups.
    """
    sizes = np.maximum(np.linalg.norm(parts.sum(axis=1), axis=1), np.float32(1e-30))
    counts = np.linalg.norm(parts, axis=2) / sizes[:, None]
    kept, best = np.ones(counts.shape, np.bool_), LeftOut(0.0, 0.0)
    low, high = 0, _STEPS + 1
    while high - low > 1:  # bisection: the error grows with the share that is left out
        middle = (low + high) // 2
        out = counts < np.quantile(counts, middle / _STEPS) if middle < _STEPS else np.ones_like(kept)
        lost = np.linalg.norm(np.einsum("tgh,tg->th", parts, out.astype(np.float32)), axis=1) / sizes
        measured = float(np.sqrt(np.mean(np.square(lost))))
        if measured <= error:
            low, kept, best = middle, ~out, LeftOut(float(out.mean()), measured)
        else:
            high = middle
    return kept, best


def head_figures(pack: Pack, tokens: I32, kernels: Kernels, error: float = DEFAULT_ERROR) -> dict[str, Any]:
    """Return the shares of groups that can be left out, of all layers and of each.

    They are measured on the first of `tokens` `[sequences, length]`.
    """
    cut = HeadCut(kernels, error)
    replay(pack, tokens[: max(1, TOKENS // tokens.shape[1])], kernels, heads=cut)
    return {"error": error, "skipped": cut.share, "layers": [one.share for one in cut.layers]}


def head_line(found: dict[str, Any]) -> str:
    """Return the sentence for the user."""
    verdict = "too few to predict them" if found["skipped"] < WORTH else "nothing predicts them"
    return (
        f"attention: {found['skipped']:.1%} of the heads, by groups that share keys, add less than "
        f"{found['error']:.0%} in all; {verdict}, so all are computed"
    )

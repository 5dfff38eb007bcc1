"""How many attention heads contribute next to nothing, and could be left out as neurons are (PowerInfer-2, DejaVu).

The unit is a KV group: the query heads that share keys and values. For a token it counts for the length of what it adds
to the block's result, as a share of that result's own length. Below its layer's threshold it is left out, and the
threshold is the largest at which what is left out has at most a stated share of the length of the result, in root mean
square over the tokens, with the layers before already cut (as `tpi.sparsity.thresholds` has it for neurons).

Contributions are known here only after everything was computed, so this is what no predictor could exceed. It decides
whether there is anything to predict: on the models that were measured there is not (docs/sparsity.md), and so nothing
leaves heads out when a model runs.
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
TOKENS = 512  # that are measured: each group is multiplied with o by itself
WORTH = 0.1  # of the groups: with fewer, what predicts them would take as long as they do
_STEPS = 100  # shares of groups left out that are tried


@dataclass(frozen=True)
class LeftOut:
    """Of one layer: the share of its groups, over all tokens, and the relative error that was measured with it."""

    share: float
    error: float


@dataclass(eq=False)
class HeadCut:
    """A `tpi.sparsity.replay.Heads` that leaves out what contributes least, within `error`; `layers` say how much."""

    kernels: Kernels
    error: float = DEFAULT_ERROR
    layers: list[LeftOut] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of all groups of all layers."""
        return float(np.mean([one.share for one in self.layers])) if self.layers else 0.0

    def __call__(self, layer: int, spec: AttentionSpec, data: U8, mixed: F32) -> F32:
        """`mixed` with zeros for what is left out."""
        groups = np.arange(spec.kv_heads)[:, None] == np.repeat(spec.kv_index, spec.head_dim)
        parts = np.stack([self.kernels.output(spec, data, mixed * group) for group in groups], axis=1)
        kept, found = keep_most(parts, self.error)
        self.layers.append(found)
        return np.asarray(mixed * (kept @ groups), np.float32)


def keep_most(parts: F32, error: float) -> tuple[Kept, LeftOut]:
    """Which of `parts` `[tokens, groups, hidden]` to keep, `[tokens, groups]`, so that sums stay within `error`."""
    sizes = np.maximum(np.linalg.norm(parts.sum(axis=1), axis=1), np.float32(1e-30))
    counts = np.linalg.norm(parts, axis=2) / sizes[:, None]
    kept, best = np.ones(counts.shape, np.bool_), LeftOut(0.0, 0.0)
    low, high = 0, _STEPS + 1
    while high - low > 1:  # the error grows with what is left out
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
    """Shares from 0 to 1 of the first of `tokens` `[sequences, length]`: `skipped`, of all layers and of each."""
    cut = HeadCut(kernels, error)
    replay(pack, tokens[: max(1, TOKENS // tokens.shape[1])], kernels, heads=cut)
    return {"error": error, "skipped": cut.share, "layers": [one.share for one in cut.layers]}


def head_line(found: dict[str, Any]) -> str:
    """For people."""
    verdict = "too few to predict them" if found["skipped"] < WORTH else "nothing predicts them"
    return (
        f"attention: {found['skipped']:.1%} of the heads, by groups that share keys, add less than "
        f"{found['error']:.0%} in all; {verdict}, so all are computed"
    )

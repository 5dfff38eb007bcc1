"""The heads of one attention in two parts, whose keys and values live on different sides.

A KV head is the unit: with the query heads that attend to it, it needs no other. So products before and after attention
are of all heads at once, wherever each is attended with.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tpi.kernels.spec import AttentionSpec, Projected
from tpi.partition import Range

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class SomeHeads:
    """Neighbouring heads of an attention: `spec` is theirs, for attending alone; the ranges are among all of them."""

    spec: AttentionSpec
    queries: Range
    kv: Range

    def of(self, projected: Projected) -> Projected:
        """Their part of all heads, each array in one piece."""
        own = self._views(projected)
        return Projected(*(np.ascontiguousarray(heads) for heads in (own.queries, own.keys, own.values)))

    def nbytes(self, projected: Projected) -> int:
        """Bytes of their part."""
        own = self._views(projected)
        return own.queries.nbytes + own.keys.nbytes + own.values.nbytes

    def _views(self, projected: Projected) -> Projected:
        queries, kv = (slice(each.first, each.last) for each in (self.queries, self.kv))
        return Projected(projected.queries[:, queries], projected.keys[:, kv], projected.values[:, kv])


def some_heads(spec: AttentionSpec, kv: Range) -> SomeHeads | None:
    """The KV heads `kv` with their query heads; None if there are none of them.

    What heads are made with is left out: biases, norms, and rotary frequencies if no latent vector is checked by them.
    """
    first, last = np.searchsorted(spec.kv_index, (kv.first, kv.last)).tolist()
    if not len(kv):
        return None
    if len(kv) == spec.kv_heads:
        return SomeHeads(spec, Range(first, last), kv)
    own = replace(
        spec,
        heads=last - first,
        kv_heads=len(kv),
        kv_index=spec.kv_index[first:last] - np.int32(kv.first),
        sinks=None if spec.sinks is None else np.ascontiguousarray(spec.sinks[first:last]),
        q_bias=None, k_bias=None, v_bias=None, q_norm=None, k_norm=None, whole=None,
        inv_freq=spec.inv_freq if spec.latent else np.empty(0, np.float32),
    )  # fmt: skip
    return SomeHeads(own, Range(first, last), kv)


def put_together(kept: F32, others: F32) -> F32:
    """What attention made of the first heads and of the others, `[tokens, heads * head_dim]` each, for the product."""
    return np.concatenate([kept, others], axis=1)

"""The division of an attention block's heads into two parts, one for the host and one for the card.

The unit is a KV head together with the query heads that attend to it, because it needs no other head. The projections
before and after attention are computed for all heads at once; only attention itself is divided.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tpi.kernels.spec import AttentionSpec, Projected
from tpi.partition import Range

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class HeadRange:
    """A range of an attention block's KV heads, with the query heads that attend to them."""

    spec: AttentionSpec  # of these heads only; for `Kernels.attend`
    queries: Range  # among all query heads of the block
    kv: Range  # among all KV heads of the block

    def of(self, projected: Projected) -> Projected:
        """Return the queries, keys and values of these heads as contiguous arrays; `projected` has all heads."""
        own = self._views(projected)
        return Projected(*(np.ascontiguousarray(heads) for heads in (own.queries, own.keys, own.values)))

    def nbytes(self, projected: Projected) -> int:
        """Return the size of these heads' queries, keys and values in bytes."""
        own = self._views(projected)
        return own.queries.nbytes + own.keys.nbytes + own.values.nbytes

    def _views(self, projected: Projected) -> Projected:
        queries, kv = (slice(each.first, each.last) for each in (self.queries, self.kv))
        return Projected(projected.queries[:, queries], projected.keys[:, kv], projected.values[:, kv])


def some_heads(spec: AttentionSpec, kv: Range) -> HeadRange | None:
    """Return the KV heads `kv` with their query heads, or None if `kv` is empty.

    The result's spec lacks the parts that only projection needs: biases, norms, and, unless attention is latent, the
    rotary frequencies.
    """
    first, last = np.searchsorted(spec.kv_index, (kv.first, kv.last)).tolist()
    if not len(kv):
        return None
    if len(kv) == spec.kv_heads:
        return HeadRange(spec, Range(first, last), kv)
    own = replace(
        spec,
        heads=last - first,
        kv_heads=len(kv),
        kv_index=spec.kv_index[first:last] - np.int32(kv.first),
        sinks=None if spec.sinks is None else np.ascontiguousarray(spec.sinks[first:last]),
        q_bias=None, k_bias=None, v_bias=None, q_norm=None, k_norm=None, v_norm=None, whole=None,
        inv_freq=spec.inv_freq if spec.latent else np.empty(0, np.float32),
    )  # fmt: skip
    return HeadRange(own, Range(first, last), kv)


def concatenate_heads(kept: F32, others: F32) -> F32:
    """Return the attention results of the first heads and of the others, `[tokens, heads * head_dim]`, as one array."""
    return np.concatenate([kept, others], axis=1)

"""Norms in the description of a block for a kernel, and the latent vectors that are normed between two products.

`tpi.kernels.spec` has the description itself.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from tpi.config import Norm
from tpi.pack.layout import RunLayout

F32 = npt.NDArray[np.float32]
NormKind = Norm | Literal["none"]


@dataclass(frozen=True, eq=False)
class NormSpec:
    """The norm of a block's input, shared by all of its segments, its router and its predictors.

    Attributes:
        kind: `rms`: `x / sqrt(mean(x^2) + eps) * weight`; `layer`: `(x - mean) / sqrt(variance + eps) * weight + bias`;
            `none`: `x` (OLMo 2).
        weight, bias: `[hidden]`; the bias belongs to LayerNorm. With `none`, the weight is empty.
    """

    kind: NormKind
    eps: float
    weight: F32
    bias: F32 | None = None


@dataclass(frozen=True, eq=False)
class WholeNorms:
    """RMS norms of a token's queries, and of its keys, over the heads of all nodes at once, before RoPE (OLMoE).

    Attributes:
        q: `[heads * head_dim]`; k: `[kv_heads * head_dim]`: weights of this node's heads.
        counted: `[kv_heads]`: False for a KV head that another node counts; a head that lies on two nodes counts once.
        q_values, k_values: number of values on all nodes together.
    """

    q: F32
    k: F32
    counted: npt.NDArray[np.bool_]
    q_values: int
    k_values: int


@dataclass(frozen=True)
class SpreadNorm:
    """The RMS norm of the results of all heads of a block, whose heads lie on several nodes (Granite 4-h).

    Each node multiplies its results by the norm's weights and by `o`, and sends the sum of their squares with its
    partial result. So the norm needs no allreduce of its own: its factor for each token is applied after that of the
    block.

    Attributes:
        values: number of values on all nodes together.
        eps: is added to the mean of the squares of these values.
    """

    values: int
    eps: float


@dataclass(frozen=True, eq=False)
class LatentSpec:
    """The latent vector that a token's keys and values come from, whole on every node (DeepSeek-V2).

    The first values are normed, and multiplied by the parts of the KV run. The remaining values are rotated (RoPE) and
    are the first part of the key of every head. The rest of a head's key comes from its `k`, its value from its `v`,
    padded with zeros to `head_dim`.

    Attributes:
        run: layout of the run with the part `latent` (rows); its units come first in a segment's weights.
        norm: norm of the first values; the length of its weight is their number.
        rope: number of values that all keys share.
        width: vectors of each part that a KV head has in the KV run.
        bias: `[values]` or None; added before the norm.
    """

    run: RunLayout
    norm: NormSpec
    rope: int
    width: int
    bias: F32 | None = None

    @property
    def rank(self) -> int:
        """Number of values of the latent vector that are normed."""
        return len(self.norm.weight)


@dataclass(frozen=True, eq=False)
class QueryLatentSpec:
    """The latent vector that a token's queries come from, whole on every node (DeepSeek-V2, section 2.1.2).

    Attributes:
        run: layout of the run with the part `q_latent` (rows); its units follow those of the run `latent`.
        up: layout of the run with the part `q` (rows) of this node's heads; its units come next.
        norm: norm of the vector, `[rank]`.
        bias: `[rank]` or None; added before the norm.
    """

    run: RunLayout
    up: RunLayout
    norm: NormSpec
    bias: F32 | None = None

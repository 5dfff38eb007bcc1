"""Embeddings of tokens for each layer (Gemma 4 E2B and E4B), and the end of a layer: a gate, a projection and a norm.

Every node computes the end of a layer for itself. That costs a few percent of a layer's weights, and saves a sum over
all nodes.
"""

import numpy as np

from tpi.config import ModelConfig
from tpi.errors import KernelError
from tpi.kernels import Kernels
from tpi.kernels.arithmetic import activate
from tpi.kernels.spec import F32, NormSpec, PerLayerSpec
from tpi.pack.layout import Part, RunLayout


def layer_embeddings(kernels: Kernels, config: ModelConfig, norm: NormSpec, rows: F32, projected: F32) -> F32:
    """Return the embeddings of tokens for all layers, `[tokens, layers * values]`, layer after layer.

    Args:
        kernels: the kernels that compute the norm.
        config: configuration of the model.
        norm: the norm of each layer's part of the projection.
        rows: the tokens' rows of the table, `[tokens, layers * values]`.
        projected: the projection of the tokens' first hidden states, `[tokens, at least layers * values]`.
    """
    rows = rows * np.float32(config.per_layer**0.5)
    projected = projected[:, : rows.shape[1]] * np.float32(config.hidden**-0.5)
    normed = kernels.norm(norm, np.ascontiguousarray(projected).reshape(-1, config.per_layer))
    return np.asarray((rows + normed.reshape(rows.shape)) * np.float32(0.5**0.5), np.float32)


def add_per_layer(kernels: Kernels, spec: PerLayerSpec, x: F32, embeddings: F32 | None) -> F32:
    """Return the hidden states `x`, `[tokens, hidden]`, with what the layer's embeddings add to them.

    Args:
        kernels: compute the products and the norm.
        spec: the matrices of the layer.
        x: the hidden states after the last block of the layer.
        embeddings: `Batch.per_layer`.

    Raises:
        KernelError: if there are no embeddings, or those of other tokens.
    """
    values = len(spec.gate)
    if embeddings is None or len(embeddings) != len(x) or embeddings.shape[1] < spec.first + values:
        raise KernelError("the embeddings of a layer are missing; use the same version of tpi on all nodes")
    inner = activate(spec.activate, None, _product(kernels, spec.gate, x))
    inner = np.ascontiguousarray(inner * embeddings[:, spec.first : spec.first + values])
    added = x + kernels.norm(spec.norm, _product(kernels, spec.projection, inner))
    return added if spec.scale == 1 else added * np.float32(spec.scale)


def _product(kernels: Kernels, matrix: F32, x: F32) -> F32:
    """Return the products of each row of `matrix` with each row of `x`, `[tokens, rows]`."""
    rows, columns = matrix.shape
    run = RunLayout("row", "record", (Part("row", "f32", "row"),), 1, columns, rows)
    return kernels.logits(run, np.ascontiguousarray(matrix).reshape(-1).view(np.uint8), x)

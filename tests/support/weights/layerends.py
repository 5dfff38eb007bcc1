"""The ends of layers outside a node: residual connections, and additions from embeddings of the layer."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from master.vocabulary.tables import PerLayerEmbeddings, ResidentTable
from tpi.block import residual
from tpi.kernels import Kernels
from tpi.kernels.perlayer import add_per_layer
from tpi.kernels.spec import NormSpec
from tpi.pack.layout import RunLayout
from tpi.pack.reader import Pack, PackBlock

F32 = npt.NDArray[np.float32]


def layer_embeddings(pack: Pack, tokens: Sequence[int], x: F32, kernels: Kernels) -> F32 | None:
    """Return the embeddings of `tokens` for all layers; None if the model has none. `x` are their hidden states."""
    if not pack.per_layer:
        return None
    table, projection = (ResidentTable(*_rows(block), kernels) for block in pack.per_layer)
    norm = NormSpec("rms", pack.config.norm_eps, pack.final.vectors()["per_layer.first_norm"])
    return PerLayerEmbeddings(pack.config, table, projection, norm, kernels)(tokens, np.ascontiguousarray(x))


def end_block(
    pack: Pack, block: PackBlock, layer: int, kernels: Kernels, x: F32, total: F32, embeddings: F32 | None
) -> F32:
    """Return the hidden states after a block of `layer`, whose sum over all nodes is `total`."""
    after = residual(pack.config, block.kind, block.vectors(), layer)
    x = kernels.add_residual(after, x, total)
    return x if after.per_layer is None else add_per_layer(kernels, after.per_layer, x, embeddings)


def _rows(block: PackBlock) -> tuple[RunLayout, npt.NDArray[np.uint8]]:
    run = block.run("row")
    return run, block.read_units("row", 0, run.units).reshape(-1)

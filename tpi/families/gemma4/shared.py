"""Settings and tensors of Gemma 4 E2B and E4B: per-layer embeddings, and layers without keys and values."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tpi.errors import ModelError
from tpi.families.base import BlockRefs, Model
from tpi.partition import FFN_UNIT

_PREFIX = "per_layer."
_ENDS = {f"{_PREFIX}{name}" for name in ("gate", "projection", "norm")}
_KEYS = ("k", "v", "k_norm", "k.bias", "v.bias")


def shared_settings(shared: int, wide: bool, sliding: Sequence[bool], intermediate: int) -> dict[str, Any]:
    """Return the ModelConfig fields about layers that read the keys and values of others.

    Args:
        shared: the number of such layers, the last ones.
        wide: True if such layers have twice as many neurons as the others.
        sliding: for each layer, whether it has a sliding window.
        intermediate: the neurons of the other layers.

    Raises:
        ModelError: if no earlier layer of their kind has keys and values, or units of neurons do not divide evenly.
    """
    if not shared:
        return {}
    own = len(sliding) - shared
    if not 0 < own < len(sliding) or not {*sliding[own:]} <= {*sliding[:own]}:
        raise ModelError(
            f"{shared} of {len(sliding)} layers use the keys and values of earlier ones, but no earlier layer of their "
            "kind has any"
        )
    if wide and intermediate % FFN_UNIT:
        raise ModelError(
            f"intermediate_size is {intermediate}: layers with twice as many neurons need a multiple of {FFN_UNIT}"
        )
    return {"shared_kv": shared, "wide_ffn": wide}


def without_keys(model: Model, unused: str) -> Model:
    """Return the model without keys and values in the layers that read those of other layers.

    If the model has no per-layer embeddings, the references to them are removed.

    Args:
        model: the model with the references of all layers.
        unused: a pattern of their tensors, which files may have nevertheless, with `{i}` for the layer.

    Raises:
        ModelError: if a tensor of the per-layer embeddings is missing.
    """
    config, model = model.config, _with_embeddings(model)
    shared = [layer for layer in range(config.layers) if config.kv_layer(layer) != layer]
    layers = tuple(
        tuple(_cut(refs) if layer in shared else refs for refs in own) for layer, own in enumerate(model.layers)
    )
    left = tuple(unused.format(i=layer, part=part) for layer in shared for part in "kv")
    return replace(model, layers=layers, ignored_tensors=(*model.ignored_tensors, *left))


def _cut(refs: BlockRefs) -> BlockRefs:
    if refs.kind != "attention":
        return refs
    parts, vectors = (tuple(pair for pair in pairs if pair[0] not in _KEYS) for pairs in (refs.parts, refs.vectors))
    return replace(refs, parts=parts, vectors=vectors)


def _with_embeddings(model: Model) -> Model:
    """Return the model, without references to per-layer embeddings if its configuration has none.

    Raises:
        ModelError: if a tensor of the per-layer embeddings is missing.
    """
    if not model.config.per_layer:
        layers = tuple(tuple(_without(refs) for refs in own) for own in model.layers)
        return replace(model, layers=layers, final=_without(model.final))
    for layer, blocks in enumerate(model.layers):
        if lacking := _ENDS - {name for name, _ in blocks[-1].vectors}:
            raise ModelError(f"layer {layer} lacks {', '.join(sorted(lacking))} of its embeddings; get the model again")
    if not any(name.startswith(_PREFIX) for name, _ in model.final.vectors):
        raise ModelError("the norm of the per-layer embeddings is missing; download or convert the model again")
    return model


def _without(refs: BlockRefs) -> BlockRefs:
    return replace(refs, vectors=tuple(pair for pair in refs.vectors if not pair[0].startswith(_PREFIX)))

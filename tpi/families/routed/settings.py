"""Settings of the families of this folder: the fields of a ModelConfig, from the complete fields of a config.json."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from tpi.config import Mixture
from tpi.errors import ModelError
from tpi.families import settings
from tpi.families.afternorm.settings import exaone_layers
from tpi.families.base import Fields, Model, float_field, int_field, size_field
from tpi.families.dense.settings import interleaved
from tpi.families.experts import sigmoid_mixture
from tpi.families.huggingface import rope as hfrope
from tpi.families.latent.settings import dense, dense_glm
from tpi.families.settings import bool_field, layer_range

_LEAST_SUM = 1e-9  # far below any sum of softmax scores that matters


def glm4(fields: Fields) -> dict[str, Any]:
    """Return the fields of GLM-4.5: DeepSeek-V3's selection of experts, and RoPE on a part of each head."""
    shared = size_field(fields, "moe_intermediate_size") * size_field(fields, "n_shared_experts")
    mixture = sigmoid_mixture(fields, size_field(fields, "n_routed_experts"), shared)
    return _partial_rope(fields) | {"mixture": mixture}


def exaone(fields: Fields) -> dict[str, Any]:
    """Return the fields of EXAONE with experts: DeepSeek-V3's selection of experts, and EXAONE 4's kinds of layers.

    Raises:
        ModelError: if a setting is not supported.
    """
    for name, only in _EXAONE.items():
        if fields[name] != only:
            raise ModelError(f"{name} is {str(fields[name])[:80]!r}; {only!r} is supported for this architecture")
    shared = size_field(fields, "moe_intermediate_size") * size_field(fields, "num_shared_experts")
    mixture = sigmoid_mixture(fields, size_field(fields, "num_experts"), shared)
    return exaone_layers(fields) | {"mixture": mixture, "mtp_whole": True}


_EXAONE = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def dense_exaone(fields: Fields) -> Collection[int]:
    """Return the numbers of the layers without experts: those of type `dense` in `mlp_layer_types`.

    If there is no such list, they are the first `first_k_dense_replace` layers.
    """
    return dense(fields) if fields["mlp_layer_types"] is None else dense_glm(fields)


def adapt_exaone(model: Model, fields: Fields) -> Model:
    """Return the model with the tensors for the prediction of further tokens declared as ignored.

    The layer for multi-token prediction is left out if it has a sliding window (`mtp_layer_types`).
    """
    kinds = fields["mtp_layer_types"]
    full = kinds is None or (isinstance(kinds, list) and kinds[:1] == ["full_attention"])
    return replace(model, ignored_tensors=(*model.ignored_tensors, "mtp.*"), mtp=model.mtp if full else None)


def without_prediction(model: Model, fields: Fields) -> Model:
    """Return the model with the tensors of the layers for prediction of further tokens declared as ignored."""
    prefix = model.embedding.tensor.removesuffix("embed_tokens.weight")
    ahead = range(int_field(fields, "num_mtp_layers", 0))
    left = tuple(f"{prefix}layers.{model.config.layers + number}.*" for number in ahead[:16])
    return replace(model, ignored_tensors=(*model.ignored_tensors, *left))


def minimax(fields: Fields) -> dict[str, Any]:
    """Return the fields of MiniMax-M2: sigmoid scores, norms over all heads, RoPE on a part of each head.

    Raises:
        ModelError: if a field describes a variant of the architecture that is not supported.
    """
    for name, only in _MINIMAX.items():
        if fields[name] != only:
            raise ModelError(f"{name} is {str(fields[name])[:80]!r}; {only!r} is supported for this architecture")
    kinds = fields["attn_type_list"]
    if kinds is not None and (not isinstance(kinds, list) or any(kind != 1 for kind in kinds)):
        raise ModelError("attn_type_list has layers without softmax attention, which are not supported; use MiniMax-M2")
    mixture = Mixture(
        size_field(fields, "num_local_experts"),
        size_field(fields, "num_experts_per_tok"),
        size_field(fields, "intermediate_size"),
        scores="sigmoid",
        normalised=True,
    )
    return _partial_rope(fields) | {"mixture": mixture, "whole_norms": True}


_MINIMAX = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer",
            "shared_intermediate_size": 0}  # fmt: skip


def _partial_rope(fields: Fields) -> dict[str, Any]:
    context = size_field(fields, "max_position_embeddings")
    return hfrope.flat(fields, settings.head_size(fields), context, partial=True).fields()


def ernie(fields: Fields) -> dict[str, Any]:
    """Return the fields of ERNIE 4.5 with experts: softmax scores, to which a bias is added for the choice alone.

    Raises:
        ModelError: if shared experts have biases, or `moe_norm_min` may be larger than a sum of scores.
    """
    least, width = float_field(fields, "moe_norm_min"), size_field(fields, "moe_intermediate_size")
    shared = width * int_field(fields, "moe_num_shared_experts")
    if shared and bool_field(fields, "use_bias"):
        raise ModelError("use_bias is true: biases of shared experts are not supported for this architecture")
    if not least <= _LEAST_SUM:
        raise ModelError(f"moe_norm_min is {least}; at most {_LEAST_SUM} is supported")
    mixture = Mixture(
        size_field(fields, "moe_num_experts"),
        size_field(fields, "moe_k"),
        width,
        shared,
        normalised=True,
    )
    return {"mixture": mixture, "mtp_whole": True}


def dense_ernie(fields: Fields) -> Collection[int]:
    """Return the numbers of the layers without experts.

    Raises:
        ModelError: if `moe_layer_interval` is not positive.
    """
    interval = size_field(fields, "moe_layer_interval")
    first, last = int_field(fields, "moe_layer_start_index"), int_field(fields, "moe_layer_end_index")
    last = len(layer_range(fields)) - 1 if last == -1 else last
    return [layer for layer in layer_range(fields) if (layer + 1) % interval or not first <= layer <= last]


def adapt_ernie(model: Model, fields: Fields) -> Model:
    """Return the model with interleaved rotary pairs; tensors for the prediction of further tokens need not be used."""
    return interleaved(replace(model, ignored_tensors=(*model.ignored_tensors, "*mtp_*")), fields)


def granite_shared(fields: Fields) -> dict[str, Any]:
    """Return the fields of Granite with experts and shared ones, which every token uses."""
    mixture = Mixture(
        size_field(fields, "num_local_experts"),
        size_field(fields, "num_experts_per_tok"),
        size_field(fields, "intermediate_size"),
        shared=int_field(fields, "shared_intermediate_size"),
        normalised=True,
    )
    return settings.granite(fields) | {"mixture": mixture}


def hunyuan(fields: Fields) -> dict[str, Any]:
    """Return the fields of Hunyuan with experts: softmax scores, a shared expert, and norms of heads after RoPE."""
    width = size_field(fields, "intermediate_size")
    experts, used = size_field(fields, "num_experts"), size_field(fields, "moe_topk")
    return {"late_head_norms": True, "mixture": Mixture(experts, used, width, shared=width, normalised=True)}

"""Settings of DeepSeek's families from a config.json: heads from a latent vector, and the selection of experts."""

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from tpi.config import Mixture
from tpi.errors import ModelError
from tpi.families.base import Fields, Model, float_field, int_field, size_field
from tpi.families.huggingface import rope as hfrope
from tpi.families.latent.heads import HeadSizes, with_head_orders, with_query_latent
from tpi.families.settings import bool_field, layer_range

_NORM_EPS = 1e-6  # epsilon of the latent vectors' norms, independent of that of the other norms
QUERY_LATENT = {"q": "q_b_proj.weight", "q_latent": "q_a_proj.weight", "q_latent.norm": "q_a_layernorm.weight"}


def v2(fields: Fields) -> dict[str, Any]:
    """Return DeepSeek-V2's fields.

    Experts are selected by a softmax over all experts: the best ones, or the best ones of the best groups. Scores are
    scaled but not normalised.

    Raises:
        ModelError: if a setting is not supported.
    """
    if fields["norm_topk_prob"]:
        raise ModelError("norm_topk_prob is true, which programs interpret differently; false is supported")
    if bool_field(fields, "mlp_bias"):
        raise ModelError("mlp_bias is true: experts with biases are not supported for this architecture")
    method = fields["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"topk_method is {str(method)[:80]!r}; greedy and group_limited_greedy are supported")
    _expect(fields, scoring_func="softmax")
    if method == "greedy":
        return _attention(fields) | {"mixture": _mixture(fields)}
    groups, used = size_field(fields, "n_group"), size_field(fields, "topk_group")
    return _attention(fields) | {"mixture": _mixture(fields, groups=groups, groups_used=used)}


def v3(fields: Fields) -> dict[str, Any]:
    """Return DeepSeek-V3's fields.

    The score of an expert is a sigmoid. For the selection, a correction is added to it. Groups are ranked by the sum of
    their two best scores.

    Raises:
        ModelError: if a setting is not supported.
    """
    _expect(fields, scoring_func="sigmoid", topk_method="noaux_tc")
    groups = size_field(fields, "n_group")
    mixture = _mixture(
        fields,
        scores="sigmoid",
        normalised=bool_field(fields, "norm_topk_prob"),
        groups=groups,
        groups_used=size_field(fields, "topk_group"),
        group_best=2 if groups > 1 else 1,
    )
    return _attention(fields) | {"mixture": mixture}


def glm(fields: Fields) -> dict[str, Any]:
    """Return the fields of GLM-4.7-Flash, which are DeepSeek-V3's; `mlp_layer_types` names the layers with experts.

    Raises:
        ModelError: if a setting is not supported.
    """
    _expect(fields, first_k_dense_replace=1)
    return v3(fields)


def dense_glm(fields: Fields) -> Collection[int]:
    """Return the numbers of the layers without experts: those of type `dense`; if there is no list of types, layer 0.

    Raises:
        ModelError: if the list has another type, or is shorter than the model.
    """
    kinds, layers = fields["mlp_layer_types"], layer_range(fields)
    if kinds is None:
        return (0,)
    if not isinstance(kinds, list) or len(kinds) < len(layers) or not set(map(str, kinds)) <= {"dense", "sparse"}:
        raise ModelError(
            f"mlp_layer_types is {str(kinds)[:80]}; dense or sparse for each of {len(layers)} layers is expected"
        )
    return [layer for layer in layers if kinds[layer] == "dense"]


def dense(fields: Fields) -> Collection[int]:
    """Return the numbers of the layers without experts: the first `first_k_dense_replace` layers."""
    first = int_field(fields, "first_k_dense_replace")
    if first < 0:
        raise ModelError(f"first_k_dense_replace is {first}; it must not be negative")
    return range(min(first, len(layer_range(fields))))


def adapt_refs(model: Model, fields: Fields) -> Model:
    """Return the model with its references adapted to the order of vectors in the heads.

    The multi-token prediction layers, which follow the last layer, need not be used.
    """
    paired = bool_field(fields, "rope_interleave") if "rope_interleave" in fields else True
    ahead = range(int_field(fields, "num_mtp_layers", 0))
    prefix = model.embedding.tensor.removesuffix("embed_tokens.weight")
    left = tuple(f"{prefix}layers.{model.config.layers + number}.*" for number in ahead[:16])
    found = with_head_orders(model, HeadSizes.of(model.config).orders(paired))
    if model.config.query_rank:
        bias = {"q_latent.bias": "q_a_proj.bias"} if fields["attention_bias"] else {}
        found = with_query_latent(found, "q_proj.weight", QUERY_LATENT | bias)
    return replace(found, ignored_tensors=(*found.ignored_tensors, *left))


def _attention(fields: Fields) -> dict[str, Any]:
    """Return the fields for the heads, the scale of attention scores, and the rotary frequencies of the shared key.

    Raises:
        ModelError: if a size is not supported.
    """
    _expect(fields, moe_layer_freq=1)
    heads = size_field(fields, "num_attention_heads")
    if fields["num_key_value_heads"] not in (None, heads):
        raise ModelError(
            f"num_key_value_heads is {str(fields['num_key_value_heads'])[:80]}; it must be {heads}, the number of "
            "heads, since each head has its own keys"
        )
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    unrotated, rotated, value, rank = (size_field(fields, name) for name in names)
    query_rank = 0 if fields["q_lora_rank"] is None else size_field(fields, "q_lora_rank")
    sizes = HeadSizes(unrotated, rotated, value, rank, query_rank)
    if sizes.value > sizes.unrotated + sizes.rope:
        raise ModelError(f"v_head_dim is {sizes.value}: values longer than keys are not supported")
    rope = hfrope.flat(fields, sizes.rope, size_field(fields, "max_position_embeddings"))
    return sizes.fields(_NORM_EPS, _sharpened(fields)) | rope.fields() | {"kv_heads": heads}


def _sharpened(fields: Fields) -> float:
    """Return YaRN's factor on attention scores, which is in addition to its factor on cosine and sine.

    Raises:
        ModelError: if another kind of scaling has `mscale_all_dim`.
    """
    scaling, kind = hfrope.scaling(fields), hfrope.scaling_kind(fields)
    weight = float_field(scaling, "mscale_all_dim", 0.0)
    if not weight or kind == "default":
        return 1.0
    if kind != "yarn":
        raise ModelError(f"mscale_all_dim is {weight} with the rope scaling {kind!r}; it is supported with yarn")
    factor = float_field(scaling, "factor")
    return (0.1 * weight * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0


def _mixture(fields: Fields, **settings: Any) -> Mixture:
    width = size_field(fields, "moe_intermediate_size")
    return Mixture(
        size_field(fields, "n_routed_experts"),
        size_field(fields, "num_experts_per_tok"),
        width,
        shared=width * size_field(fields, "n_shared_experts"),
        scale=float_field(fields, "routed_scaling_factor"),
        **settings,
    )


def _expect(fields: Fields, **values: object) -> None:
    """Raise a ModelError unless each of the fields has the given value."""
    for name, value in values.items():
        if fields[name] != value:
            raise ModelError(f"{name} is {str(fields[name])[:80]}; {value} is supported for this architecture")

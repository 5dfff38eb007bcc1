"""Settings of DeepSeek's families from a config.json: heads from a latent vector, and the selection of experts."""

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from tpi.config import Mixture
from tpi.errors import ModelError
from tpi.families.base import Fields, Model, float_field, int_field, size_field
from tpi.families.huggingface import rope as hfrope
from tpi.families.latent.heads import HeadSizes, with_head_orders
from tpi.families.settings import bool_field, layer_range

_NORM_EPS = 1e-6  # epsilon of the latent vector's norm, independent of that of the other norms
WITHOUT_QUERY_LATENT = (
    "queries that come from a latent vector of their own are not supported; take a model without q_lora_rank, such as "
    "DeepSeek-V2-Lite or Moonlight-16B-A3B"
)


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
    mixture = _mixture(
        fields,
        scores="sigmoid",
        normalised=bool_field(fields, "norm_topk_prob"),
        groups=size_field(fields, "n_group"),
        groups_used=size_field(fields, "topk_group"),
        group_best=2,
    )
    return _attention(fields) | {"mixture": mixture}


def dense(fields: Fields) -> Collection[int]:
    """Return the numbers of the layers without experts: the first `first_k_dense_replace` layers."""
    first = int_field(fields, "first_k_dense_replace")
    if first < 0:
        raise ModelError(f"first_k_dense_replace is {first}; it must not be negative")
    return range(min(first, len(layer_range(fields))))


def adapt_refs(model: Model, fields: Fields) -> Model:
    """Return the model with its references adapted to the order of vectors in the heads.

    The multi-token prediction layers, which follow the last layer, may go unused.
    """
    paired = bool_field(fields, "rope_interleave") if "rope_interleave" in fields else True
    ahead = range(int_field(fields, "num_mtp_layers", 0))
    prefix = model.embedding.tensor.removesuffix("embed_tokens.weight")
    left = tuple(f"{prefix}layers.{model.config.layers + number}.*" for number in ahead[:16])
    found = with_head_orders(model, HeadSizes.of(model.config).orders(paired))
    return replace(found, ignored_tensors=(*found.ignored_tensors, *left))


def _attention(fields: Fields) -> dict[str, Any]:
    """Return the fields for the heads, the scale of attention scores, and the rotary frequencies of the shared key.

    Raises:
        ModelError: if queries come from a latent vector too, or a size is not supported.
    """
    if fields["q_lora_rank"] is not None:
        raise ModelError(f"q_lora_rank is {str(fields['q_lora_rank'])[:80]}: {WITHOUT_QUERY_LATENT}")
    _expect(fields, moe_layer_freq=1)
    heads = size_field(fields, "num_attention_heads")
    if fields["num_key_value_heads"] not in (None, heads):
        raise ModelError(
            f"num_key_value_heads is {str(fields['num_key_value_heads'])[:80]}; it must be {heads}, the number of "
            "heads, since each head has its own keys"
        )
    sizes = HeadSizes(*(size_field(fields, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
                                                         "kv_lora_rank")))  # fmt: skip
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
    """Raise a ModelError unless the fields have these values."""
    for name, value in values.items():
        if fields[name] != value:
            raise ModelError(f"{name} is {str(fields[name])[:80]}; {value} is supported for this architecture")

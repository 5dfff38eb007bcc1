"""Settings of DeepSeek's families from GGUF metadata, as llama.cpp's converter writes it (architecture `deepseek2`)."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tpi.config import Mixture
from tpi.errors import ModelError
from tpi.families.base import Fields, Model, float_field, int_field, size_field
from tpi.families.gguf import rope
from tpi.families.gguf.experts import SOFTMAX_OF_SELECTED, UNSPECIFIED, mixture
from tpi.families.gguf.prediction import main_layers, without_prediction
from tpi.families.latent.heads import HeadSizes, with_head_orders, with_query_latent, with_separate_kv

QUERY_LATENT = {"q": "attn_q_b.weight", "q_latent": "attn_q_a.weight", "q_latent.norm": "attn_q_a_norm.weight"}

_GLM_VOCAB = 154880


def gguf_settings(fields: Fields) -> dict[str, Any]:
    """Return the ModelConfig fields for the heads, the scale of attention scores, and the experts.

    Raises:
        ModelError: if sizes or scaling are not supported.
    """
    fields.get("leading_dense_block_count")  # mark as read: the tensors say which layers have experts
    sizes, heads = _sizes(fields), size_field(fields, "attention.head_count")
    eps = float_field(fields, "attention.layer_norm_rms_epsilon")
    found = sizes.fields(eps, _sharpened(fields)) | {"kv_heads": heads, "mixture": _mixture(fields)}
    found |= {"layers": main_layers(fields)}
    return found | ({"rope_scale": 1.0} if fields.get("rope.scaling.type") == "yarn" else {})


def adapt_gguf_refs(model: Model, has: Callable[[str], bool]) -> Model:
    """Return the model with its references adapted to the order of vectors in the heads.

    If queries come from a latent vector, the references name its tensors. In older files, keys and values are in one
    tensor; in newer files, each has its own.
    """
    found = with_head_orders(without_prediction(model), HeadSizes.of(model.config).orders(paired=True))
    if model.config.query_rank:
        found = with_query_latent(found, "attn_q.weight", QUERY_LATENT)
    if has("blk.0.attn_kv_b.weight"):
        return replace(
            found, ignored_tensors=(*found.ignored_tensors, "blk.*.attn_k_b.weight", "blk.*.attn_v_b.weight")
        )
    return with_separate_kv(found)


def _sizes(fields: Fields) -> HeadSizes:
    """Return the numbers of values in the parts of a head.

    In newer files, `attention.key_length` and `attention.value_length` are sizes after weight absorption; the metadata
    keys that end in `_mla` have the actual sizes.

    Raises:
        ModelError: if the sizes do not fit each other.
    """
    rank, rope = size_field(fields, "attention.kv_lora_rank"), size_field(fields, "rope.dimension_count")
    heads, kv_heads = size_field(fields, "attention.head_count"), size_field(fields, "attention.head_count_kv")
    key, value = size_field(fields, "attention.key_length"), size_field(fields, "attention.value_length")
    absorbed = "attention.key_length_mla" in fields
    wanted = (1, rank + rope, rank) if absorbed else (heads, key, value)
    if (kv_heads, key, value) != wanted or key <= rope:
        raise ModelError(
            f"{kv_heads} KV heads with keys of {key} and values of {value} do not fit a latent vector of {rank} and "
            f"a shared key of {rope}"
        )
    if absorbed:
        key, value = size_field(fields, "attention.key_length_mla"), size_field(fields, "attention.value_length_mla")
    return HeadSizes(max(key - rope, 0), rope, value, rank, int_field(fields, "attention.q_lora_rank", 0))


def _sharpened(fields: Fields) -> float:
    """Return YaRN's factor on attention scores; 1 without scaling of positions.

    `rope.scaling.yarn_log_multiplier` is a tenth of DeepSeek's `mscale_all_dim`. These models have no factor on cosine
    and sine.

    Raises:
        ModelError: if the file has another factor on attention, or a scaling other than YaRN with a log multiplier,
            which programs interpret differently.
    """
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        if float_field(fields, key, 1.0) != 1:
            raise ModelError(f"{key} is {fields[key]}, which is not supported for this architecture")
    weight, factor = float_field(fields, "rope.scaling.yarn_log_multiplier", 0.0), rope.factor_of(fields)
    if factor == 1:
        return 1.0
    if fields.get("rope.scaling.type") != "yarn" or not weight or factor < 1 or not rope.extrapolates(fields):
        raise ModelError(
            f"positions are divided by {factor} without YaRN and its weight (rope.scaling.yarn_log_multiplier), which "
            "programs interpret differently for this architecture"
        )
    return (1.0 + weight * math.log(factor)) ** 2


def _mixture(fields: Fields) -> Mixture:
    if (
        fields.get("expert_gating_func") == SOFTMAX_OF_SELECTED
    ):  # does not fit a correction that is added for the selection
        raise ModelError(f"expert_gating_func is {SOFTMAX_OF_SELECTED}; softmax and sigmoid are supported")
    width = size_field(fields, "expert_feed_forward_length")
    found = mixture(fields, normalised=False, width=width, shared=width * size_field(fields, "expert_shared_count"))
    unspecified = int_field(fields, "expert_gating_func", UNSPECIFIED) == UNSPECIFIED
    return replace(found, scores="sigmoid") if unspecified and _is_glm(fields) else found


def _is_glm(fields: Fields) -> bool:
    """Return True for GLM-4.7-Flash, by llama.cpp's rule. The first files of that model do not record that scores are a
    sigmoid.
    """
    return fields.get("vocab_size") == _GLM_VOCAB and main_layers(fields) in (47, 48)

"""Settings of the architectures with experts: fields of a ModelConfig, from the metadata of GGUF files.

Most architectures select experts in one fixed way. Files need not record it, but some do. Each of llama.cpp's keys
about experts is used here, is accepted with a neutral value, or leads to an error that names the key.
"""

from typing import Any

from tpi.config import Mixture
from tpi.errors import ModelError
from tpi.families.base import Fields, float_field, int_field, size_field
from tpi.families.gguf import settings

UNSPECIFIED, SOFTMAX, SIGMOID, SOFTMAX_OF_SELECTED = range(4)  # llama.cpp's values of expert_gating_func


def llama(fields: Fields) -> dict[str, Any]:
    """Return the fields of Llama, or of Mixtral, which has the same architecture: softmax over the selected experts."""
    found = settings.every_layer_slides(fields)
    if not fields.get("expert_count"):
        return found
    return found | {"mixture": mixture(fields, normalised=True)}


def qwen2(fields: Fields) -> dict[str, Any]:
    """Return the fields of Qwen2-MoE, which has one shared expert.

    Raises:
        ModelError: if the file records another number of shared experts.
    """
    if (experts := int_field(fields, "expert_shared_count", 1)) != 1:
        raise ModelError(f"expert_shared_count is {experts}; this architecture has 1")
    shared = int_field(fields, "expert_shared_feed_forward_length", 0) or size_field(fields, "feed_forward_length")
    return {"mixture": mixture(fields, normalised=False, width=_share(fields), shared=shared)}


def qwen3(fields: Fields) -> dict[str, Any]:
    """Return the fields of Qwen3-MoE. Scores of selected experts are normalised, which most files do not record."""
    return {"mixture": mixture(fields, normalised=True, width=_share(fields))}


def olmoe(fields: Fields) -> dict[str, Any]:
    """Return OLMoE's fields: softmax over all experts; queries, keys and values may be clipped."""
    clip = float_field(fields, "attention.clamp_kqv", 0.0)
    return {"mixture": mixture(fields, normalised=False), "whole_norms": True, "attention_clip": clip}


def granite(fields: Fields) -> dict[str, Any]:
    """Return the fields of Granite with experts: softmax over the selected experts, and Granite's multipliers.

    The model may have shared experts too. Files of Granite 4 without experts name this architecture if no layer has
    Mamba2.
    """
    if not fields.get("expert_count"):
        return settings.dense_granite(fields)
    shared = int_field(fields, "expert_shared_feed_forward_length", 0)
    return settings.granite(fields) | {"mixture": mixture(fields, normalised=True, shared=shared)}


def gpt_oss(fields: Fields) -> dict[str, Any]:
    """Return the fields of gpt-oss: sliding windows in every other layer, and a clamped SwiGLU.

    GGUF does not record the parameters of the activation; they are llama.cpp's.
    """
    settings.check_local_base(fields)
    return {
        "mixture": mixture(fields, normalised=True),
        "activation": "swiglu_clamped",
        "activation_threshold": 7.0,
        "activation_slope": 1.702,
        **settings.every_other_slides(fields),
    }


def dbrx(fields: Fields) -> dict[str, Any]:
    """Return DBRX's fields: LayerNorm without a bias; queries, keys and values are clipped."""
    return {
        "norm": "layer",
        "norm_eps": float_field(fields, "attention.layer_norm_epsilon"),
        "attention_clip": float_field(fields, "attention.clamp_kqv", 0.0),
        "mixture": mixture(fields, normalised=True),
    }


def mixture(
    fields: Fields, normalised: bool, width: int | None = None, shared: int = 0, gating: int = UNSPECIFIED
) -> Mixture:
    """Return the settings of experts that the metadata describes.

    Args:
        fields: the metadata.
        normalised: True if the scores of the selected experts are divided by their sum. The file may override it.
        width: the neurons of an expert if the file does not record them; None: as many as a feed-forward network has.
        shared: the neurons of the shared experts together.
        gating: the kind of scores if the file does not record it.

    Raises:
        ModelError: if the scores or the groups of experts are of a kind that is not supported.
    """
    width = int_field(fields, "expert_feed_forward_length", 0) or width or size_field(fields, "feed_forward_length")
    gating = int_field(fields, "expert_gating_func", UNSPECIFIED) or gating
    if gating not in (UNSPECIFIED, SOFTMAX, SIGMOID, SOFTMAX_OF_SELECTED):
        raise ModelError(f"expert_gating_func is {gating}; softmax and sigmoid are supported")
    groups, used = _groups(fields, gating)
    return Mixture(
        size_field(fields, "expert_count"),
        size_field(fields, "expert_used_count"),
        width,
        shared,
        scores="sigmoid" if gating == SIGMOID else "softmax",
        normalised=_flag(fields, "expert_weights_norm", normalised) or gating == SOFTMAX_OF_SELECTED,
        scale=float_field(fields, "expert_weights_scale", 1.0) or 1.0,
        groups=groups,
        groups_used=used,
        group_best=2 if groups > 1 else 1,
    )


def _groups(fields: Fields, gating: int) -> tuple[int, int]:
    """Return the number of groups of experts, and the number of groups from which experts are selected.

    `gating` is the kind of scores, such as `SIGMOID`. llama.cpp ranks groups by the sum of their two best scores.

    Raises:
        ModelError: if only some groups are used and scores are not a sigmoid. DeepSeek-V2 ranks such groups by their
            best score, unlike llama.cpp.
    """
    groups, used = int_field(fields, "expert_group_count", 0) or 1, int_field(fields, "expert_group_used_count", 0) or 1
    if groups == 1 or groups == used:
        return 1, 1
    if gating != SIGMOID:
        raise ModelError(
            f"expert_group_count is {groups} with scores that are not a sigmoid; programs interpret this differently"
        )
    return groups, used


def _share(fields: Fields) -> int:
    """Return the number of neurons of an expert, for older files of Qwen.

    Such files record only the total number of neurons of all experts that a token uses.
    """
    return max(size_field(fields, "feed_forward_length") // size_field(fields, "expert_used_count"), 1)


def _flag(fields: Fields, key: str, default: bool) -> bool:
    value = fields.get(key, default)
    if type(value) is not bool:
        raise ModelError(f"{key} is {str(value)[:80]!r}; true or false is expected")
    return value

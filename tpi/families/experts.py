"""Settings of the families with experts: the fields of a ModelConfig, from the complete fields of a config.json."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from tpi.config import Mixture
from tpi.errors import ModelError
from tpi.families import settings
from tpi.families.base import BlockRefs, Fields, Model, Ref, float_field, int_field, size_field
from tpi.families.huggingface import rope as hfrope
from tpi.families.huggingface.expertdefaults import MICROSCALED
from tpi.families.settings import bool_field, layer_range, sliding_layers, windows_of


def mixtral(fields: Fields) -> dict[str, Any]:
    """Return Mixtral's fields: softmax over the selected experts; sliding windows in all layers or none."""
    mixture = Mixture(_experts(fields), _used(fields), size_field(fields, "intermediate_size"), normalised=True)
    return settings.mistral(fields) | {"mixture": mixture}


def sigmoid_mixture(fields: Fields, experts: int, shared: int) -> Mixture:
    """Return the settings of `experts` experts, and `shared` neurons of shared ones, with DeepSeek-V3's router.

    The score of an expert is a sigmoid. Groups of experts are ranked by the sum of their two best scores.
    """
    groups = size_field(fields, "n_group")
    return Mixture(
        experts,
        size_field(fields, "num_experts_per_tok"),
        size_field(fields, "moe_intermediate_size"),
        shared=shared,
        scores="sigmoid",
        normalised=bool_field(fields, "norm_topk_prob"),
        scale=float_field(fields, "routed_scaling_factor"),
        groups=groups,
        groups_used=size_field(fields, "topk_group"),
        group_best=2 if groups > 1 else 1,
    )


def qwen2(fields: Fields) -> dict[str, Any]:
    """Return the fields of Qwen2-MoE, which has a shared expert with a sigmoid gate.

    Sliding windows, if used, are in the layers that `layer_types` lists, or else in every
    other of the first `max_window_layers` layers.

    Raises:
        ModelError: if `layer_types` lists sliding layers although sliding windows are disabled.
    """
    first, slides = int_field(fields, "max_window_layers"), bool_field(fields, "use_sliding_window")
    sliding = sliding_layers(fields, [slides and layer % 2 == 0 and layer < first for layer in layer_range(fields)])
    if any(sliding) and not slides:
        raise ModelError("layer_types lists sliding layers, but use_sliding_window is false")
    mixture = _qwen(fields, shared=size_field(fields, "shared_expert_intermediate_size"))
    return windows_of(fields, sliding) | {"mixture": mixture}


def qwen3(fields: Fields) -> dict[str, Any]:
    """Return the fields of Qwen3-MoE: sliding windows in all layers or none."""
    windows = settings.mistral(fields) if bool_field(fields, "use_sliding_window") else {}
    return windows | {"mixture": _qwen(fields)}


def olmoe(fields: Fields) -> dict[str, Any]:
    """Return OLMoE's fields: queries and keys are normalised over all heads at once, and may be clipped."""
    mixture = Mixture(
        _experts(fields),
        _used(fields),
        size_field(fields, "intermediate_size"),
        normalised=bool_field(fields, "norm_topk_prob"),
    )
    return {"mixture": mixture, "whole_norms": True, "attention_clip": _clip(fields)}


def granite(fields: Fields) -> dict[str, Any]:
    """Return the fields of Granite with experts: softmax over the selected experts, and Granite's multipliers."""
    mixture = Mixture(_experts(fields), _used(fields), size_field(fields, "intermediate_size"), normalised=True)
    return settings.granite(fields) | {"mixture": mixture}


def dbrx(fields: Fields) -> dict[str, Any]:
    """Return DBRX's fields: LayerNorm without a bias; queries, keys and values are clipped.

    `fields` are flat and have Llama's names (`tpi.families.huggingface.dbrx.flat`).

    Raises:
        ModelError: if the scores of the selected experts are normalised to anything but a sum of 1.
    """
    power = fields["moe_normalize_expert_weights"]
    if power not in (None, 1):
        raise ModelError(f"moe_normalize_expert_weights is {power!r}; 1 or null is supported")
    width = size_field(fields, "intermediate_size")
    return {
        "norm": "layer",
        "norm_eps": 1e-5,
        "attention_clip": _clip(fields),
        "mixture": Mixture(_experts(fields), _used(fields), width, normalised=power is not None),
    }


def gpt_oss(fields: Fields) -> dict[str, Any]:
    """Return the fields of gpt-oss: a clamped SwiGLU, and YaRN unless the configuration says otherwise.

    Sliding windows are in the layers that `layer_types` lists, or else in every other layer. The activation in the
    configuration is not used; transformers does not use it either.
    """
    if fields["rope_parameters"] is None and fields["rope_scaling"] is None:
        fields = {**fields, "rope_parameters": _GPT_OSS_ROPE}
    rope = hfrope.flat(fields, settings.head_size(fields), size_field(fields, "max_position_embeddings"))
    sliding = sliding_layers(fields, [layer % 2 == 0 for layer in layer_range(fields)])
    return {
        "mixture": Mixture(_experts(fields), _used(fields), size_field(fields, "intermediate_size"), normalised=True),
        "activation": "swiglu_clamped",
        "activation_threshold": float_field(fields, "swiglu_limit"),
        "activation_slope": float_field(fields, "swiglu_alpha"),
        **rope.fields(),
        **windows_of(fields, sliding),
    }


_GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def unquantised_gpt_oss(model: Model, fields: Fields) -> Model:
    """Return the model with its references adapted to experts that are not in MXFP4.

    These are stored transposed, with gate and up in alternate columns.
    """
    if fields[MICROSCALED]:
        return model
    config, width = model.config, model.config.mixture.width if model.config.mixture else 0

    def transposed(expert: int, name: str, ref: Ref) -> Ref:
        size = width if name == "down" else config.hidden
        rows = (expert * size, (expert + 1) * size)
        return replace(ref, tensor=ref.tensor.removesuffix("_blocks"), rows=rows, transposed=True)

    def block(refs: BlockRefs) -> BlockRefs:
        parts = enumerate(refs.experts)
        return replace(
            refs, experts=tuple(tuple((name, transposed(at, name, ref)) for name, ref in part) for at, part in parts)
        )

    return replace(model, layers=tuple(tuple(map(block, layer)) for layer in model.layers))


def dense_qwen(fields: Fields) -> Collection[int]:
    """Return the numbers of the layers without experts in a Qwen model."""
    step, listed = int_field(fields, "decoder_sparse_step"), fields["mlp_only_layers"]
    if step < 1:
        raise ModelError(f"decoder_sparse_step is {step}; it must be at least 1")
    if listed is not None and not (isinstance(listed, list) and all(type(layer) is int for layer in listed)):
        raise ModelError("mlp_only_layers is not a list of layer numbers")
    return [layer for layer in layer_range(fields) if (layer + 1) % step or layer in (listed or ())]


def _qwen(fields: Fields, shared: int = 0) -> Mixture:
    return Mixture(
        _experts(fields),
        _used(fields),
        size_field(fields, "moe_intermediate_size"),
        shared,
        normalised=bool_field(fields, "norm_topk_prob"),
    )


def _experts(fields: Fields) -> int:
    """Return the number of experts, which families call `num_experts` or `num_local_experts`."""
    return size_field(fields, "num_experts" if "num_experts" in fields else "num_local_experts")


def _used(fields: Fields) -> int:
    return size_field(fields, "num_experts_per_tok")


def _clip(fields: Fields) -> float:
    if fields["clip_qkv"] is None:
        return 0.0
    clip = float_field(fields, "clip_qkv")
    if clip <= 0:
        raise ModelError(f"clip_qkv is {clip}; a positive number is expected")
    return clip

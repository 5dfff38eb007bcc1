"""Settings of the families of this folder from GGUF metadata, as llama.cpp's converters write it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tpi.errors import ModelError
from tpi.families.base import Fields, Model, int_field, size_field
from tpi.families.gguf.experts import SIGMOID, mixture
from tpi.families.gguf.prediction import main_layers
from tpi.families.gguf.settings import check_local_base, sliding_pattern

_PERIOD = 4  # without a pattern, every fourth layer of EXAONE has full attention and the others a window


def glm4(fields: Fields) -> dict[str, Any]:
    """Return the fields of GLM-4.5. The number of layers excludes the last ones, which predict further tokens.

    Raises:
        ModelError: if all layers are for the prediction of further tokens.
    """
    for key in ("leading_dense_block_count", "rope.dimension_sections"):
        fields.get(key)  # mark as read: the tensors say which layers have experts; text has one position per token
    layers = size_field(fields, "block_count") - int_field(fields, "nextn_predict_layers", 0)
    if layers < 1:
        raise ModelError(f"block_count is {fields['block_count']}, but nextn_predict_layers leaves {layers} layers")
    width = int_field(fields, "expert_feed_forward_length", 0)
    shared = width * int_field(fields, "expert_shared_count", 0)
    return {"layers": layers, "mixture": mixture(fields, normalised=False, shared=shared, gating=SIGMOID)}


def without_prediction(model: Model, has: Callable[[str], bool]) -> Model:
    """Return the model without its layers for multi-token prediction: their tensors are declared as ignored."""
    last = (f"blk.{model.config.layers + number}.*" for number in range(4))
    return replace(model, ignored_tensors=(*model.ignored_tensors, *last))


def exaone(fields: Fields) -> dict[str, Any]:
    """Return the fields of EXAONE with experts: three of four layers have a sliding window, and only these have RoPE.

    The number of layers excludes the last ones, which predict further tokens.
    """
    fields.get("leading_dense_block_count")  # mark as read: the tensors say which layers have experts
    layers, window = main_layers(fields), size_field(fields, "attention.sliding_window")
    sliding = sliding_pattern(fields, _PERIOD, layers)
    width, shared = size_field(fields, "expert_feed_forward_length"), int_field(fields, "expert_shared_count", 0)
    shared = int_field(fields, "expert_shared_feed_forward_length", 0) or shared * width
    check_local_base(fields)
    return {
        "layers": layers,
        "windows": tuple(window if slides else 0 for slides in sliding),
        "rope_kinds": tuple(map(int, sliding)),
        "mtp_whole": True,
        "mixture": mixture(fields, normalised=False, shared=shared, gating=SIGMOID),
    }


def minimax(fields: Fields) -> dict[str, Any]:
    """Return the fields of MiniMax-M2: sigmoid scores, and norms over all heads."""
    return {"whole_norms": True, "mixture": mixture(fields, normalised=True, gating=SIGMOID)}


def ernie(fields: Fields) -> dict[str, Any]:
    """Return the fields of ERNIE 4.5 with experts: softmax over all experts, a bias for the choice, shared experts."""
    for key in ("leading_dense_block_count", "interleave_moe_layer_step", "expert_shared_count"):
        fields.get(key)  # mark as read: the tensors say which layers have experts
    shared = int_field(fields, "expert_shared_feed_forward_length", 0)
    return {"mixture": mixture(fields, normalised=True, shared=shared)}


def hunyuan(fields: Fields) -> dict[str, Any]:
    """Return the fields of Hunyuan with experts: softmax over all experts, a shared expert, late norms of heads.

    Raises:
        ModelError: if the experts have another size than llama.cpp assumes.
    """
    width = size_field(fields, "feed_forward_length")
    if (given := int_field(fields, "expert_feed_forward_length", width)) != width:
        raise ModelError(f"expert_feed_forward_length is {given}, but feed_forward_length is {width}")
    fields.get("expert_shared_count")  # mark as read: there is one, which has all neurons
    shared = int_field(fields, "expert_shared_feed_forward_length", 0) or width
    return {"late_head_norms": True, "mixture": mixture(fields, normalised=True, shared=shared)}

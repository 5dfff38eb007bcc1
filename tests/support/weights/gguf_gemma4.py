"""Writer of Gemma 4 models of transformers as GGUF files, named as llama.cpp's converter does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from tests.support.weights.gguf_models import Array, write_tensors

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "layer_scalar": "layer_output_scale.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
} | {f"self_attn.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"} | {
    f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")
}  # fmt: skip


def gguf_tensors(reference: Any, fused: bool = True) -> dict[str, Array]:
    """Return the weights by their GGUF names, with the factors that say which values full layers rotate.

    Gate and up of experts are in one tensor if `fused`.
    """
    config = reference.config
    found: dict[str, Array] = {}
    for name, tensor in reference.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        named = f"blk.{layer}.{_NAMES[rest]}" if name.startswith("model.layers.") else _NAMES[name]
        found[named] = tensor.numpy()
    for name in [name for name in found if "gate_up" in name and not fused]:
        halves = np.split(found.pop(name), 2, axis=1)
        found |= {name.replace("gate_up", part): half for part, half in zip(("gate", "up"), halves, strict=True)}
    pairs = config.per_layer_config[config.num_hidden_layers - 1].head_dim // 2
    turned = int(config.rope_parameters["full_attention"].get("partial_rotary_factor", 1.0) * pairs)
    return found | {"rope_freqs.weight": np.array([1.0] * turned + [1e30] * (pairs - turned), np.float32)}


def gguf_keys(config: Any) -> dict[str, Any]:
    """Return the metadata, without the architecture's prefix."""
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    each, ropes = [config.per_layer_config[layer] for layer in range(len(sliding))], config.rope_parameters
    kv_heads, sizes = ([getattr(own, name) for own in each] for name in ("num_key_value_heads", "head_dim"))
    full, slides = sizes[-1], sizes[sliding.index(True)] if any(sliding) else sizes[-1]
    width, shared = config.intermediate_size, config.num_kv_shared_layers
    own, wide = len(sliding) - shared, shared and config.use_double_wide_mlp
    experts = {
        "expert_count": config.num_experts, "expert_used_count": config.top_k_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
    } if config.enable_moe_block else {}  # fmt: skip
    return experts | {
        "attention.head_count_kv": kv_heads if len({*kv_heads}) > 1 else kv_heads[0],
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": [*[width] * own, *[2 * width] * shared] if wide else width,
        "attention.head_count": config.num_attention_heads, "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": full, "attention.value_length": full,
        "attention.key_length_swa": slides, "attention.value_length_swa": slides,
        "attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": sliding,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "rope.freq_base": float(ropes["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(ropes["sliding_attention"]["rope_theta"]),
        "rope.dimension_count": full, "rope.dimension_count_swa": slides,
        "final_logit_softcapping": config.final_logit_softcapping or 0.0,
    }  # fmt: skip


def write_gguf(
    path: Path,
    reference: Any,
    keys: dict[str, Any] | None = None,
    vocabulary: Callable[[GGUFWriter], None] = lambda writer: None,
    leave_out: str = "",
    fused: bool = True,
) -> None:
    """Write a model in float32; `keys` are further metadata; leave out the tensor `leave_out`."""
    writer = GGUFWriter(path, "gemma4")
    for key, value in (gguf_keys(reference.config) | (keys or {})).items():
        if isinstance(value, list):
            writer.add_array(f"gemma4.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"gemma4.{key}", value)
        else:
            writer.add_uint32(f"gemma4.{key}", value)
    vocabulary(writer)
    kept = {name: values for name, values in gguf_tensors(reference, fused).items() if name != leave_out}
    write_tensors(writer, kept, lambda name: "F32")

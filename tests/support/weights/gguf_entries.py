"""Writer of tiny models of Muse Glimmer and EXAONE with experts as GGUF files, named as llama.cpp's converter does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from tests.support.models import TinyModel
from tests.support.weights.gguf_models import Array, interleave, write_tensors

_NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.o_proj.bias": "attn_output.bias",
    "self_attn.gate_proj.weight": "attn_gate.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    **{f"self_attn.{part}_proj.{kind}": f"attn_{part}.{kind}" for part in "qkv" for kind in ("weight", "bias")},
    **{f"self_attn.{part}_norm.weight": f"attn_{part}_norm.weight" for part in "qk"},
    **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
}
_SANDWICH = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}


def _tensors(model: TinyModel, architecture: str) -> dict[str, Array]:
    """Return the weights by their GGUF names, float32."""
    muse, config = architecture == "muse-glimmer", model.reference.config.get_text_config()
    names, found = _NAMES | (_SANDWICH if muse else {}), dict[str, Array]()
    for name, tensor in model.reference.state_dict().items():
        inside, data = name.removeprefix("model.").removeprefix("language_model."), tensor.numpy()
        number, _, rest = inside.removeprefix("layers.").partition(".")
        at = f"blk.{number}." if inside.startswith("layers.") else ""
        if rest == "mlp.experts.gate_up_proj":
            halves = zip(("gate", "up"), np.split(data, 2, axis=1), strict=True)
            found |= {f"{at}ffn_{part}_exps.weight": half for part, half in halves}
            continue
        if (rest if at else inside) not in names:
            continue  # of the vision tower
        if muse and at and rest.endswith("layernorm.weight"):
            data = data + 1
        if muse and rest.startswith(("self_attn.q_proj", "self_attn.k_proj")):
            data = interleave(data, config.head_dim)
        found[at + names[rest if at else inside]] = data
    for layer in range(config.num_hidden_layers) if muse else ():
        for part, value in (("q", config.qk_scale_factor), ("k", 1.0)):
            found[f"blk.{layer}.attn_{part}_norm.weight"] = np.full(config.head_dim, value, np.float32)
    return found


def _keys(config: Any, architecture: str) -> dict[str, Any]:
    """Return the metadata, without the architecture's prefix."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": size, "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }  # fmt: skip
    if architecture == "muse-glimmer":
        return found | {
            "logit_scale": config.output_multiplier, "final_logit_softcapping": config.final_logit_softcapping,
        }  # fmt: skip
    width = config.moe_intermediate_size
    return found | {
        "expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": width, "expert_shared_count": config.num_shared_experts,
        "expert_shared_feed_forward_length": width * config.num_shared_experts, "expert_gating_func": 2,
        "expert_weights_scale": config.routed_scaling_factor, "expert_weights_norm": config.norm_topk_prob,
        "expert_group_count": config.n_group, "expert_group_used_count": config.topk_group,
        "leading_dense_block_count": 1, "nextn_predict_layers": 0, "rope.scaling.type": "none",
    }  # fmt: skip


def write_gguf(
    path: Path,
    model: TinyModel,
    architecture: str,
    kind: Callable[[str], str] = lambda name: "F32",
    vocabulary: Callable[[GGUFWriter], None] = lambda writer: None,
) -> None:
    """Write a model; `kind(name)` is the GGML type of each matrix, vectors stay F32."""
    writer = GGUFWriter(path, architecture)
    for key, value in _keys(model.reference.config.get_text_config(), architecture).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(f"{architecture}.{key}", value)
    vocabulary(writer)
    write_tensors(writer, _tensors(model, architecture), kind)

"""Writer of the tiny models with experts as GGUF files, named and stacked as llama.cpp's converter does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import ExpertGatingFuncType, GGMLQuantizationType, GGUFWriter, RopeScalingType

from tests.support.models import TinyModel
from tests.support.weights.gguf_models import encoded, interleave

Array = npt.NDArray[Any]

ARCHITECTURES = {
    "mixtral": "llama",
    "gptoss": "gpt-oss",
    "deepseek3": "deepseek2",
    "glm4moelite": "deepseek2",
}  # where it is not the family's name
ABSORBED = ("deepseek3", "glm4moelite")  # written as newer converters write latent attention
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "transformer.wte.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "transformer.norm_f.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "norm_attn_norm.norm_1.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "norm_attn_norm.norm_2.weight": "attn_output_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "norm_attn_norm.attn.out_proj.weight": "attn_output.weight",
    "norm_attn_norm.attn.Wqkv.weight": "attn_qkv.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "ffn.router.layer.weight": "ffn_gate_inp.weight",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.o_proj.bias": "attn_output.bias",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.kv_b_proj.weight": "attn_kv_b.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"mlp.shared_experts.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
    **{f"self_attn.{part}_proj.{kind}": f"attn_{part}.{kind}" for part in "qkv" for kind in ("weight", "bias")},
    **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
}
_GLM4 = {"post_attention_layernorm.weight": "post_attention_norm.weight"}
_STACKED = {"w1": "gate", "v1": "up", "w2": "down"}


def tensors(model: TinyModel, family: str) -> dict[str, Array]:
    """Return the weights by their GGUF names, float32."""
    config = model.reference.config
    found: dict[str, Array] = {}
    for name, tensor in model.reference.state_dict().items():
        values = tensor.numpy()
        if family in ("mixtral", "granitemoe") and (".q_proj." in name or ".k_proj." in name):
            values = interleave(values, config.hidden_size // config.num_attention_heads)
        prefix = next((each for each in ("model.layers.", "transformer.blocks.") if name.startswith(each)), "")
        layer, _, rest = name.removeprefix(prefix).partition(".") if prefix else ("", "", name)
        parts = _gpt_oss(rest, values) if family == "gptoss" else _experts(rest, values, config)
        parts = parts or (_apart(rest, values, config) if family in ABSORBED else {})
        names = _NAMES | _GLM4 if family == "glm4moe" else _NAMES
        parts = parts or {names[rest]: values.reshape(-1) if "_gate.w" in rest else values}
        found |= {f"blk.{layer}.{part}" if prefix else part: each for part, each in parts.items()}
    return found


def _experts(name: str, values: Array, config: Any) -> dict[str, Array]:
    """Return the stacks of experts in a tensor; empty for other tensors."""
    last = name.rpartition(".")[2]
    if last == "gate_up_proj":
        gate, up = np.split(values, 2, axis=1)
        return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    if last == "down_proj":
        return {"ffn_down_exps.weight": values}
    if last in _STACKED:
        stack = values.reshape(config.ffn_config.moe_num_experts, -1, values.shape[1])
        return {f"ffn_{_STACKED[last]}_exps.weight": stack.swapaxes(1, 2) if last == "w2" else stack}
    return {}


def _apart(name: str, values: Array, config: Any) -> dict[str, Array]:
    """Return the matrices of keys (transposed) and values from the latent vector, as in newer files.

    The result is empty for other tensors.
    """
    if name != "self_attn.kv_b_proj.weight":
        return {}
    heads = values.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, own = np.split(heads, [config.qk_nope_head_dim], axis=1)
    return {"attn_k_b.weight": keys.swapaxes(1, 2), "attn_v_b.weight": own}


def _gpt_oss(name: str, values: Array) -> dict[str, Array]:
    """Return the stacks of gpt-oss, whose experts are transposed and biased, with gate and up in turn."""
    last = name.rpartition(".")[2]
    if last.startswith("gate_up_proj"):
        kind = "bias" if last.endswith("bias") else "weight"
        turned = values if kind == "bias" else values.swapaxes(1, 2)
        return {f"ffn_gate_exps.{kind}": turned[:, ::2], f"ffn_up_exps.{kind}": turned[:, 1::2]}
    if last.startswith("down_proj"):
        kind, turned = ("bias", values) if last.endswith("bias") else ("weight", values.swapaxes(1, 2))
        return {f"ffn_down_exps.{kind}": turned}
    return {"post_attention_norm.weight": values} if name == "post_attention_layernorm.weight" else {}


def write_experts(path: Path, model: TinyModel, family: str, kind: Callable[[str], str] = lambda name: "F32") -> None:
    """Write the model `family`; `kind(name)` is the GGML type of each matrix, vectors and routers stay F32."""
    config = model.reference.config
    writer = GGUFWriter(path, ARCHITECTURES.get(family, family))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if ARCHITECTURES.get(family, family) == "deepseek2":
        _describe_latent(writer, config, absorbed=family in ABSORBED)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _describe(writer, family, config)
    for name, values in tensors(model, family).items():
        plain = values.ndim < 2 or "ffn_gate_inp" in name or name.endswith(".bias")
        coded = encoded(np.ascontiguousarray(values), "F32" if plain else kind(name))
        raw = None if coded.dtype != np.uint8 else GGMLQuantizationType[kind(name)]
        writer.add_tensor(name, coded, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: GGUFWriter, family: str, config: Any) -> None:
    if family == "dbrx":
        writer.add_feed_forward_length(config.ffn_config.ffn_hidden_size)
        writer.add_expert_count(config.ffn_config.moe_num_experts)
        writer.add_expert_used_count(config.ffn_config.moe_top_k)
        writer.add_layer_norm_eps(1e-5)
        writer.add_clamp_kqv(config.attn_config.clip_qkv)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if family.startswith("qwen"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if family == "glm4moe":
        size = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(round(size * config.rope_parameters["partial_rotary_factor"]))
        _describe_routed(writer, config)
    if family == "olmoe":
        writer.add_clamp_kqv(config.clip_qkv)
    if family == "gptoss":
        writer.add_sliding_window(config.sliding_window)
    if config.rope_parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    if family == "granitemoe":
        writer.add_logit_scale(config.logits_scaling)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_multiplier)


def _describe_latent(writer: GGUFWriter, config: Any, absorbed: bool) -> None:
    """Write metadata of latent attention as the converter does for DeepSeek's models.

    Older files describe the heads. Newer files (`absorbed`) describe the latent vector, since the matrices of keys and
    values are absorbed in queries and in the output.
    """
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    sizes = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    if absorbed:
        writer.add_head_count_kv(1)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(sizes[0])
        writer.add_value_length_mla(sizes[1])
    else:
        writer.add_head_count_kv(config.num_attention_heads)
        writer.add_key_length(sizes[0])
        writer.add_value_length(sizes[1])
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])
    _describe_routed(writer, config, sigmoid=absorbed)


def _describe_routed(writer: GGUFWriter, config: Any, sigmoid: bool = True) -> None:
    """Write metadata of DeepSeek's experts, with the sigmoid scores and groups of DeepSeek-V3 if `sigmoid`."""
    if sigmoid:
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    writer.add_leading_dense_block_count(getattr(config, "first_k_dense_replace", 1))
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)

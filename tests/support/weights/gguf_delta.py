"""Writer of the tiny models with DeltaNet layers as GGUF files, named and ordered as llama.cpp's converter does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter

from tests.support.models import TinyModel
from tests.support.weights.gguf_models import write_tensors

Array = npt.NDArray[Any]

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    **{f"self_attn.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
    **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
}


def tensors(model: TinyModel, family: str) -> dict[str, Array]:
    """Return float32 weights by GGUF names: 1 + w in norms (not the gated one), value heads tiled in Qwen3.5."""
    config = model.reference.config
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    wide = keys * config.linear_key_head_dim
    found: dict[str, Array] = {}
    for name, tensor in model.reference.state_dict().items():
        data, rest = tensor.numpy(), name.removeprefix("model.layers.").partition(".")[2]
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            data = data + 1
        if rest == "linear_attn.A_log":
            data = -np.exp(data)
        if rest == "linear_attn.conv1d.weight":
            data = data.squeeze(1)
        at = f"blk.{name.split('.')[2]}." if name.startswith("model.layers.") else ""
        if rest == "mlp.experts.gate_up_proj":
            for part, half in zip(("gate", "up"), np.split(data, 2, axis=1), strict=True):
                found[f"{at}ffn_{part}_exps.weight"] = half
            continue
        if rest == "linear_attn.in_proj_qkvz.weight":
            q, k, v, z = _parts(data, config)
            found |= {f"{at}attn_qkv.weight": np.concatenate([q, k, v]), f"{at}attn_gate.weight": z}
            continue
        if family != "qwen3next" and rest.startswith("linear_attn."):
            data = _tiled(rest.removeprefix("linear_attn."), data, keys, values, wide)
        found[at + (_NAMES[rest] if at else _NAMES[name])] = data
    return found


def _parts(data: Array, config: Any) -> list[Array]:
    """Return q, k, v and z of Qwen3-Next, whose tensor interleaves them by key head."""
    size = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    ends = np.cumsum([config.linear_key_head_dim, config.linear_key_head_dim, size])
    heads = data.reshape(config.linear_num_key_heads, -1, data.shape[-1])
    return [part.reshape(-1, data.shape[-1]) for part in np.split(heads, ends, axis=1)]


def _tiled(name: str, data: Array, keys: int, heads: int, wide: int) -> Array:
    """Return `data` with value heads reordered: the first head of each key head, then the second of each, and so on."""

    def rows(part: Array) -> Array:
        return np.asarray(part.reshape(keys, heads // keys, -1, *part.shape[1:]).swapaxes(0, 1).reshape(part.shape))

    if name in ("in_proj_qkv.weight", "conv1d.weight"):
        return np.concatenate([data[: 2 * wide], rows(data[2 * wide :])])
    if name == "out_proj.weight":
        return np.ascontiguousarray(rows(np.ascontiguousarray(data.T)).T)
    return data if name == "norm.weight" else rows(data)


def write_gguf(
    path: Path,
    model: TinyModel,
    family: str,
    kind: Callable[[str], str] = lambda name: "F32",
    vocabulary: Callable[[GGUFWriter], None] = lambda writer: None,
) -> None:
    """Write a model; `kind(name)` is the GGML type of each matrix, vectors and the convolution stay F32."""
    config, writer = model.reference.config, GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    rotary = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    writer.add_rope_dimension_count(rotary)
    if family != "qwen3next":
        writer.add_rope_dimension_sections([rotary // 4, rotary // 8, rotary // 8, 0])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_uint32(f"{family}.full_attention_interval", config.layer_types.index("full_attention") + 1)
    if family == "qwen35":
        writer.add_feed_forward_length(config.intermediate_size)
    else:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if family == "qwen3next":
        writer.add_feed_forward_length(config.intermediate_size)
    vocabulary(writer)
    write_tensors(writer, tensors(model, family), kind, ("conv1d",))

"""Writer of the tiny models with Mamba2 layers as GGUF files, named as llama.cpp's converter does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter

from tests.support.models import TinyModel
from tests.support.weights.gguf_models import interleave, write_tensors

Array = npt.NDArray[Any]

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mamba.in_proj.weight": "ssm_in.weight",
    "mamba.out_proj.weight": "ssm_out.weight",
    "mamba.conv1d.weight": "ssm_conv1d.weight",
    "mamba.conv1d.bias": "ssm_conv1d.bias",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.norm.weight": "ssm_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
    **{f"self_attn.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
}
_FLOATS = ("ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm")


def tensors(model: TinyModel) -> dict[str, Array]:
    """Return the weights by their GGUF names, float32."""
    config = model.reference.config
    experts, found = config.num_local_experts > 0, dict[str, Array]()
    for name, tensor in model.reference.state_dict().items():
        data, rest = tensor.numpy(), name.removeprefix("model.layers.").partition(".")[2]
        at = f"blk.{name.split('.')[2]}." if name.startswith("model.layers.") else ""
        shared = "_shexp" if experts else ""
        if rest in ("block_sparse_moe.experts.gate_up_proj", "shared_mlp.input_linear.weight"):
            ending = "_exps" if "experts" in rest else shared
            for part, half in zip(("gate", "up"), np.split(data, 2, axis=-2), strict=True):
                found[f"{at}ffn_{part}{ending}.weight"] = half
            continue
        if rest == "shared_mlp.output_linear.weight":
            found[f"{at}ffn_down{shared}.weight"] = data
            continue
        found[at + (_NAMES[rest] if at else _NAMES[name])] = _stored(rest, data, config)
    return found


def _stored(name: str, data: Array, config: Any) -> Array:
    if name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
        return interleave(data, config.hidden_size // config.num_attention_heads)
    if name == "mamba.A_log":
        return np.asarray(-np.exp(data)[:, None])
    if name == "mamba.norm.weight":
        return data.reshape(config.mamba_n_groups, -1)
    return data[:, None] if name == "mamba.D" else data.squeeze(1) if name == "mamba.conv1d.weight" else data


def write_gguf(
    path: Path,
    model: TinyModel,
    kind: Callable[[str], str] = lambda name: "F32",
    vocabulary: Callable[[GGUFWriter], None] = lambda writer: None,
) -> None:
    """Write a model; `kind(name)` is the GGML type of each matrix, matrices of states and convolutions stay F32."""
    config, writer = model.reference.config, GGUFWriter(path, "granitehybrid")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    attends = [kind == "full_attention" for kind in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads if each else 0 for each in attends])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    writer.add_logit_scale(config.logits_scaling)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok if config.num_local_experts else 0)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    vocabulary(writer)
    write_tensors(writer, tensors(model), kind, _FLOATS)

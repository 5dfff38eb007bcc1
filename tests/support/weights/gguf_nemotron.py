"""Writer of the tiny models of Nemotron-H as GGUF files, named as llama.cpp's converter does."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFValueType, GGUFWriter

from tests.support.models import TinyModel
from tests.support.weights.gguf_models import write_tensors

Array = npt.NDArray[Any]

_NAMES = {
    "model.embeddings.weight": "token_embd.weight",
    "model.norm_f.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "norm.weight": "attn_norm.weight",
    "mixer.in_proj.weight": "ssm_in.weight",
    "mixer.out_proj.weight": "ssm_out.weight",
    "mixer.conv1d.weight": "ssm_conv1d.weight",
    "mixer.conv1d.bias": "ssm_conv1d.bias",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm.weight": "ssm_norm.weight",
    "mixer.o_proj.weight": "attn_output.weight",
    "mixer.gate.weight": "ffn_gate_inp.weight",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"mixer.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
    **{f"mixer.{part}_proj.{kind}": f"ffn_{part}.{kind}" for part in ("up", "down") for kind in ("weight", "bias")},
    **{f"mixer.experts.{part}_proj": f"ffn_{part}_exps.weight" for part in ("up", "down")},
    **{f"mixer.shared_experts.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("up", "down")},
}
_FLOATS = ("ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm")


def tensors(model: TinyModel) -> dict[str, Array]:
    """Return the weights by their GGUF names, float32."""
    found, groups = dict[str, Array](), model.reference.config.n_groups
    for name, tensor in model.reference.state_dict().items():
        data, (number, _, rest) = tensor.numpy(), name.removeprefix("model.layers.").partition(".")
        if not name.startswith("model.layers."):
            found[_NAMES[name]] = data
            continue
        if rest in ("mixer.A_log", "mixer.D"):
            data = np.asarray(-np.exp(data) if rest == "mixer.A_log" else data)[:, None]
        if rest == "mixer.norm.weight":
            data = data.reshape(groups, -1)
        found[f"blk.{number}.{_NAMES[rest]}"] = data.squeeze(1) if rest == "mixer.conv1d.weight" else data
    return found


def write_gguf(
    path: Path,
    model: TinyModel,
    kind: Callable[[str], str] = lambda name: "F32",
    vocabulary: Callable[[GGUFWriter], None] = lambda writer: None,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Write a model; `kind(name)` is the GGML type of each matrix, matrices of states and convolutions stay F32.

    `changes` replace metadata of the model.
    """
    config = model.reference.config
    kinds, routed = config.layers_block_type, "moe" in config.layers_block_type
    writer = GGUFWriter(path, "nemotron_h_moe" if routed else "nemotron_h")
    writer.add_block_count(len(kinds))
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_scaling_finetuned(False)
    width = config.moe_intermediate_size if routed else config.intermediate_size
    writer.add_feed_forward_length([width if kind in ("moe", "mlp") else 0 for kind in kinds])
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    if routed:
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(width)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    vocabulary(writer)
    for key, value in (changes or {}).items():
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, value, GGUFValueType.get_type(value))
    write_tensors(writer, tensors(model), kind, _FLOATS)

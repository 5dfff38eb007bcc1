"""Writer of the tiny models with short convolutions as GGUF files, named as llama.cpp's converter does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import ExpertGatingFuncType, GGUFWriter

from tests.support.models import TinyModel
from tests.support.weights.gguf_models import write_tensors

Array = npt.NDArray[Any]

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "operator_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "conv.in_proj.weight": "shortconv.in_proj.weight",
    "conv.out_proj.weight": "shortconv.out_proj.weight",
    "conv.conv.weight": "shortconv.conv.weight",
    "self_attn.out_proj.weight": "attn_output.weight",
    "self_attn.q_layernorm.weight": "attn_q_norm.weight",
    "self_attn.k_layernorm.weight": "attn_k_norm.weight",
    "feed_forward.w1.weight": "ffn_gate.weight",
    "feed_forward.w3.weight": "ffn_up.weight",
    "feed_forward.w2.weight": "ffn_down.weight",
    "feed_forward.gate.weight": "ffn_gate_inp.weight",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "feed_forward.experts.down_proj": "ffn_down_exps.weight",
    **{f"self_attn.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
}


def tensors(model: TinyModel) -> dict[str, Array]:
    """Return the weights by their GGUF names, float32."""
    found: dict[str, Array] = {}
    for name, tensor in model.reference.state_dict().items():
        data, rest = tensor.numpy(), name.removeprefix("model.layers.").partition(".")[2]
        if name == "lm_head.weight" and model.reference.config.tie_word_embeddings:
            continue
        at = f"blk.{name.split('.')[2]}." if name.startswith("model.layers.") else ""
        if rest == "feed_forward.experts.gate_up_proj":
            for part, half in zip(("gate", "up"), np.split(data, 2, axis=1), strict=True):
                found[f"{at}ffn_{part}_exps.weight"] = half
            continue
        found[at + (_NAMES[rest] if at else _NAMES[name])] = data.squeeze(1) if rest == "conv.conv.weight" else data
    return found


def write_gguf(
    path: Path,
    model: TinyModel,
    family: str,
    kind: Callable[[str], str] = lambda name: "F32",
    vocabulary: Callable[[GGUFWriter], None] = lambda writer: None,
    window: int = 0,
) -> None:
    """Write a model; `kind(name)` is the GGML type of each matrix, vectors and the convolution stay F32.

    `window` is the sliding window of its attention, 0 for none.
    """
    config, writer = model.reference.config, GGUFWriter(path, family)
    written = tensors(model)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([0 if each == "conv" else config.num_key_value_heads for each in config.layer_types])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_feed_forward_length(len(written["blk.0.ffn_gate.weight"]))
    if window:
        writer.add_sliding_window(window)
    if family == "lfm2moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
    vocabulary(writer)
    write_tensors(writer, written, kind, ("shortconv.conv",))

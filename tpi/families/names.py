"""Tensor names of each family's matrices and vectors, in Hugging Face directories and in GGUF files."""

LLAMA_ATTENTION = {
    "norm": "layers.{i}.input_layernorm.weight",
    "q": "layers.{i}.self_attn.q_proj.weight",
    "k": "layers.{i}.self_attn.k_proj.weight",
    "v": "layers.{i}.self_attn.v_proj.weight",
    "o": "layers.{i}.self_attn.o_proj.weight",
    "q.bias": "layers.{i}.self_attn.q_proj.bias?attention_bias",
    "k.bias": "layers.{i}.self_attn.k_proj.bias?attention_bias",
    "v.bias": "layers.{i}.self_attn.v_proj.bias?attention_bias",
    "o.bias": "layers.{i}.self_attn.o_proj.bias?attention_bias",
}
MISTRAL_ATTENTION = {name: text for name, text in LLAMA_ATTENTION.items() if not name.endswith(".bias")}
QWEN2_ATTENTION = MISTRAL_ATTENTION | {
    f"{part}.bias": f"layers.{{i}}.self_attn.{part}_proj.bias" for part in ("q", "k", "v")
}
QWEN3_ATTENTION = LLAMA_ATTENTION | {
    "q_norm": "layers.{i}.self_attn.q_norm.weight",
    "k_norm": "layers.{i}.self_attn.k_norm.weight",
}
PHI3_ATTENTION = {
    "norm": "layers.{i}.input_layernorm.weight",
    "q": "layers.{i}.self_attn.qkv_proj.weight[q]",
    "k": "layers.{i}.self_attn.qkv_proj.weight[k]",
    "v": "layers.{i}.self_attn.qkv_proj.weight[v]",
    "o": "layers.{i}.self_attn.o_proj.weight",
}
LLAMA_FFN = {
    "norm": "layers.{i}.post_attention_layernorm.weight",
    "gate": "layers.{i}.mlp.gate_proj.weight",
    "up": "layers.{i}.mlp.up_proj.weight",
    "down": "layers.{i}.mlp.down_proj.weight",
    "gate.bias": "layers.{i}.mlp.gate_proj.bias?mlp_bias",
    "up.bias": "layers.{i}.mlp.up_proj.bias?mlp_bias",
    "down.bias": "layers.{i}.mlp.down_proj.bias?mlp_bias",
}
MISTRAL_FFN = {name: text for name, text in LLAMA_FFN.items() if not name.endswith(".bias")}
PHI3_FFN = {
    "norm": "layers.{i}.post_attention_layernorm.weight",
    "gate": "layers.{i}.mlp.gate_up_proj.weight[gate]",
    "up": "layers.{i}.mlp.gate_up_proj.weight[up]",
    "down": "layers.{i}.mlp.down_proj.weight",
}
GEMMA2_ATTENTION = LLAMA_ATTENTION | {"post_norm": "layers.{i}.post_attention_layernorm.weight"}
GEMMA3_ATTENTION = QWEN3_ATTENTION | {"post_norm": "layers.{i}.post_attention_layernorm.weight"}
GEMMA2_FFN = MISTRAL_FFN | {
    "norm": "layers.{i}.pre_feedforward_layernorm.weight",
    "post_norm": "layers.{i}.post_feedforward_layernorm.weight",
}
OPT_ATTENTION = {
    "norm": "layers.{i}.self_attn_layer_norm.weight",
    "norm.bias": "layers.{i}.self_attn_layer_norm.bias",
    "q": "layers.{i}.self_attn.q_proj.weight",
    "k": "layers.{i}.self_attn.k_proj.weight",
    "v": "layers.{i}.self_attn.v_proj.weight",
    "o": "layers.{i}.self_attn.out_proj.weight",
    "q.bias": "layers.{i}.self_attn.q_proj.bias?enable_bias",
    "k.bias": "layers.{i}.self_attn.k_proj.bias?enable_bias",
    "v.bias": "layers.{i}.self_attn.v_proj.bias?enable_bias",
    "o.bias": "layers.{i}.self_attn.out_proj.bias?enable_bias",
}
OPT_FFN = {
    "norm": "layers.{i}.final_layer_norm.weight",
    "norm.bias": "layers.{i}.final_layer_norm.bias",
    "up": "layers.{i}.fc1.weight",
    "down": "layers.{i}.fc2.weight",
    "up.bias": "layers.{i}.fc1.bias?enable_bias",
    "down.bias": "layers.{i}.fc2.bias?enable_bias",
}
GGUF_ATTENTION = {
    "norm": "blk.{i}.attn_norm.weight",
    "q": "blk.{i}.attn_q.weight",
    "k": "blk.{i}.attn_k.weight",
    "v": "blk.{i}.attn_v.weight",
    "o": "blk.{i}.attn_output.weight",
    "q.bias": "blk.{i}.attn_q.bias?",
    "k.bias": "blk.{i}.attn_k.bias?",
    "v.bias": "blk.{i}.attn_v.bias?",
    "o.bias": "blk.{i}.attn_output.bias?",
}
GGUF_FFN = {
    "norm": "blk.{i}.ffn_norm.weight",
    "gate": "blk.{i}.ffn_gate.weight",
    "up": "blk.{i}.ffn_up.weight",
    "down": "blk.{i}.ffn_down.weight",
    "gate.bias": "blk.{i}.ffn_gate.bias?",
    "up.bias": "blk.{i}.ffn_up.bias?",
    "down.bias": "blk.{i}.ffn_down.bias?",
}
GGUF_OPT_ATTENTION = GGUF_ATTENTION | {"norm.bias": "blk.{i}.attn_norm.bias"}
GGUF_OPT_FFN = {name: text for name, text in GGUF_FFN.items() if not name.startswith("gate")} | {
    "norm.bias": "blk.{i}.ffn_norm.bias",
    "down.bias": "blk.{i}.ffn_down_t.bias?",
}
GGUF_HEAD_NORMS = {f"{part}_norm": f"blk.{{i}}.attn_{part}_norm.weight" for part in ("q", "k")}
GGUF_GEMMA_ATTENTION = GGUF_ATTENTION | {"post_norm": "blk.{i}.post_attention_norm.weight"}
GGUF_GEMMA_FFN = GGUF_FFN | {"post_norm": "blk.{i}.post_ffw_norm.weight"}
GGUF_FUSED_ATTENTION = GGUF_ATTENTION | {
    f"{part}{kind}": f"blk.{{i}}.attn_qkv.{tensor}" for part in ("q", "k", "v")
    for kind, tensor in (("", f"weight[{part}]"), (".bias", f"bias[{part}]?"))
}  # fmt: skip
GGUF_FUSED_FFN = GGUF_FFN | {
    f"{part}{kind}": f"blk.{{i}}.ffn_up.{tensor}" for part in ("gate", "up")
    for kind, tensor in (("", f"weight[{part}]"), (".bias", f"bias[{part}]?"))
}  # fmt: skip

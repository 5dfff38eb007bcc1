"""Tensor names of experts, in Hugging Face directories and in GGUF files. `shared.` marks the shared experts."""

from tpi.families.names import GGUF_ATTENTION, GGUF_FFN, GGUF_HEAD_NORMS, LLAMA_ATTENTION, MISTRAL_ATTENTION

_NORM = {"norm": "layers.{i}.post_attention_layernorm.weight"}
_PARTS = ("gate", "up", "down")

MIXTRAL_EXPERTS = _NORM | {
    "router": "layers.{i}.block_sparse_moe.gate.weight",
    "gate": "layers.{i}.block_sparse_moe.experts.{e}.w1.weight",
    "up": "layers.{i}.block_sparse_moe.experts.{e}.w3.weight",
    "down": "layers.{i}.block_sparse_moe.experts.{e}.w2.weight",
}
QWEN_EXPERTS = (
    _NORM
    | {"router": "layers.{i}.mlp.gate.weight"}
    | {part: f"layers.{{i}}.mlp.experts.{{e}}.{part}_proj.weight" for part in _PARTS}
)
QWEN2_EXPERTS = (
    QWEN_EXPERTS
    | {"shared.scale": "layers.{i}.mlp.shared_expert_gate.weight"}
    | {f"shared.{part}": f"layers.{{i}}.mlp.shared_expert.{part}_proj.weight" for part in _PARTS}
)
QWEN2_MOE_ATTENTION = MISTRAL_ATTENTION | {
    f"{part}.bias": f"layers.{{i}}.self_attn.{part}_proj.bias?qkv_bias" for part in ("q", "k", "v")
}
OLMOE_ATTENTION = LLAMA_ATTENTION | {
    f"{part}_norm.whole": f"layers.{{i}}.self_attn.{part}_norm.weight" for part in ("q", "k")
}
GRANITE_EXPERTS = _NORM | {
    "router": "layers.{i}.block_sparse_moe.router.layer.weight",
    "gate": "layers.{i}.block_sparse_moe.input_linear.weight[expert.gate]",
    "up": "layers.{i}.block_sparse_moe.input_linear.weight[expert.up]",
    "down": "layers.{i}.block_sparse_moe.output_linear.weight[expert]",
}
GPT_OSS_ATTENTION = LLAMA_ATTENTION | {"sinks": "layers.{i}.self_attn.sinks"}
GPT_OSS_EXPERTS = _NORM | {
    "router": "layers.{i}.mlp.router.weight",
    "router.bias": "layers.{i}.mlp.router.bias",
    "gate": "layers.{i}.mlp.experts.gate_up_proj_blocks[expert.even]",
    "up": "layers.{i}.mlp.experts.gate_up_proj_blocks[expert.odd]",
    "down": "layers.{i}.mlp.experts.down_proj_blocks[expert]",
    "gate.biases": "layers.{i}.mlp.experts.gate_up_proj_bias[even]",
    "up.biases": "layers.{i}.mlp.experts.gate_up_proj_bias[odd]",
    "down.biases": "layers.{i}.mlp.experts.down_proj_bias",
}
DBRX_ATTENTION = {
    "norm": "blocks.{i}.norm_attn_norm.norm_1.weight",
    "q": "blocks.{i}.norm_attn_norm.attn.Wqkv.weight[q]",
    "k": "blocks.{i}.norm_attn_norm.attn.Wqkv.weight[k]",
    "v": "blocks.{i}.norm_attn_norm.attn.Wqkv.weight[v]",
    "o": "blocks.{i}.norm_attn_norm.attn.out_proj.weight",
}
DBRX_EXPERTS = {
    "norm": "blocks.{i}.norm_attn_norm.norm_2.weight",
    "router": "blocks.{i}.ffn.router.layer.weight",
    "gate": "blocks.{i}.ffn.experts.mlp.w1[expert]",
    "up": "blocks.{i}.ffn.experts.mlp.v1[expert]",
    "down": "blocks.{i}.ffn.experts.mlp.w2[expert.transposed]",
}
GGUF_OLMOE_ATTENTION = {
    name.replace("_norm", "_norm.whole"): text for name, text in (GGUF_ATTENTION | GGUF_HEAD_NORMS).items()
}
GGUF_EXPERTS = {"norm": GGUF_FFN["norm"], "router": "blk.{i}.ffn_gate_inp.weight"} | {
    part: f"blk.{{i}}.ffn_{part}_exps.weight[expert]" for part in _PARTS
}
GGUF_GPT_OSS_ATTENTION = GGUF_ATTENTION | {"sinks": "blk.{i}.attn_sinks.weight"}
GGUF_GPT_OSS_EXPERTS = (
    GGUF_EXPERTS
    | {"norm": "blk.{i}.post_attention_norm.weight", "router.bias": "blk.{i}.ffn_gate_inp.bias"}
    | {f"{part}.biases": f"blk.{{i}}.ffn_{part}_exps.bias" for part in _PARTS}
)
GGUF_SHARED = {f"shared.{part}": f"blk.{{i}}.ffn_{part}_shexp.weight" for part in _PARTS}
GGUF_GATED_SHARED = GGUF_SHARED | {"shared.scale": "blk.{i}.ffn_gate_inp_shexp.weight"}

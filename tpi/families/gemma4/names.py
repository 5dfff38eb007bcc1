"""Tensor names of Gemma 4, in Hugging Face directories and in GGUF files."""

from tpi.families.names import (
    GEMMA2_FFN,
    GEMMA3_ATTENTION,
    GGUF_GEMMA_ATTENTION,
    GGUF_GEMMA_FFN,
    GGUF_HEAD_NORMS,
)

ATTENTION = GEMMA3_ATTENTION
FFN = GEMMA2_FFN | {"layer_scale": "layers.{i}.layer_scalar?"}
# Besides a dense feed-forward block, of which each layer has one, too
EXPERTS = {
    "norm": "layers.{i}.pre_feedforward_layernorm_2.weight",
    "dense_norm": "layers.{i}.post_feedforward_layernorm_1.weight",
    "post_norm": "layers.{i}.post_feedforward_layernorm_2.weight",
    "layer_norm": FFN["post_norm"],
    "layer_scale": FFN["layer_scale"],
    "router": "layers.{i}.router.proj.weight",
    "router.norm": "layers.{i}.router.scale",
    "router.factors": "layers.{i}.router.per_expert_scale",
    "gate": "layers.{i}.experts.gate_up_proj[expert.gate]",
    "up": "layers.{i}.experts.gate_up_proj[expert.up]",
    "down": "layers.{i}.experts.down_proj[expert]",
}
GGUF_ATTENTION = (
    GGUF_GEMMA_ATTENTION | GGUF_HEAD_NORMS | {"v": "blk.{i}.attn_v.weight|blk.{i}.attn_k.weight"}
)  # without values of their own, a layer's keys before their norm are its values
GGUF_FFN = GGUF_GEMMA_FFN | {"layer_scale": "blk.{i}.layer_output_scale.weight?"}
GGUF_EXPERTS = {
    "norm": "blk.{i}.pre_ffw_norm_2.weight",
    "dense_norm": "blk.{i}.post_ffw_norm_1.weight",
    "post_norm": "blk.{i}.post_ffw_norm_2.weight",
    "layer_norm": GGUF_FFN["post_norm"],
    "layer_scale": GGUF_FFN["layer_scale"],
    "router": "blk.{i}.ffn_gate_inp.weight",
    "router.norm": "blk.{i}.ffn_gate_inp.scale",
    "router.factors": "blk.{i}.ffn_down_exps.scale?",
    "gate": "blk.{i}.ffn_gate_up_exps.weight[expert.gate]|blk.{i}.ffn_gate_exps.weight[expert]",
    "up": "blk.{i}.ffn_gate_up_exps.weight[expert.up]|blk.{i}.ffn_up_exps.weight[expert]",
    "down": "blk.{i}.ffn_down_exps.weight[expert]",
}

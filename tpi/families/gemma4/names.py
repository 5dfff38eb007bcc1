"""Tensor names of Gemma 4, in Hugging Face directories and in GGUF files."""

from tpi.families.names import (
    GEMMA2_FFN,
    GEMMA3_ATTENTION,
    GGUF_GEMMA_ATTENTION,
    GGUF_GEMMA_FFN,
    GGUF_HEAD_NORMS,
)

ATTENTION = GEMMA3_ATTENTION
ENDS = {
    "layer_scale": "layers.{i}.layer_scalar?",
    "per_layer.gate": "layers.{i}.per_layer_input_gate.weight?",
    "per_layer.projection": "layers.{i}.per_layer_projection.weight?",
    "per_layer.norm": "layers.{i}.post_per_layer_input_norm.weight?",
}
FFN = GEMMA2_FFN | ENDS
PER_LAYER = ("embed_tokens_per_layer.weight", "per_layer_model_projection.weight")
FIRST_NORM = "per_layer_projection_norm.weight?"
# The block of experts of a layer. Each layer has a dense feed-forward block in addition.
EXPERTS = {
    "norm": "layers.{i}.pre_feedforward_layernorm_2.weight",
    "dense_norm": "layers.{i}.post_feedforward_layernorm_1.weight",
    "post_norm": "layers.{i}.post_feedforward_layernorm_2.weight",
    "layer_norm": FFN["post_norm"],
    **ENDS,
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
GGUF_ENDS = {
    "layer_scale": "blk.{i}.layer_output_scale.weight?",
    "per_layer.gate": "blk.{i}.inp_gate.weight?",
    "per_layer.projection": "blk.{i}.proj.weight?",
    "per_layer.norm": "blk.{i}.post_norm.weight?",
}
GGUF_FFN = GGUF_GEMMA_FFN | GGUF_ENDS
GGUF_PER_LAYER = ("per_layer_token_embd.weight", "per_layer_model_proj.weight")
GGUF_FIRST_NORM = "per_layer_proj_norm.weight?"
GGUF_EXPERTS = {
    "norm": "blk.{i}.pre_ffw_norm_2.weight",
    "dense_norm": "blk.{i}.post_ffw_norm_1.weight",
    "post_norm": "blk.{i}.post_ffw_norm_2.weight",
    "layer_norm": GGUF_FFN["post_norm"],
    **GGUF_ENDS,
    "router": "blk.{i}.ffn_gate_inp.weight",
    "router.norm": "blk.{i}.ffn_gate_inp.scale",
    "router.factors": "blk.{i}.ffn_down_exps.scale?",
    "gate": "blk.{i}.ffn_gate_up_exps.weight[expert.gate]|blk.{i}.ffn_gate_exps.weight[expert]",
    "up": "blk.{i}.ffn_gate_up_exps.weight[expert.up]|blk.{i}.ffn_up_exps.weight[expert]",
    "down": "blk.{i}.ffn_down_exps.weight[expert]",
}

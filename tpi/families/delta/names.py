"""Tensor names of the families with DeltaNet layers, in Hugging Face directories and in GGUF files."""

from tpi.families.expertnames import GGUF_EXPERTS, GGUF_GATED_SHARED, QWEN2_EXPERTS
from tpi.families.names import GGUF_ATTENTION, GGUF_FFN, GGUF_HEAD_NORMS, QWEN3_ATTENTION

GATED_ATTENTION = QWEN3_ATTENTION | {"gate": QWEN3_ATTENTION["q"]}
_SHARED = {
    "norm": "layers.{i}.input_layernorm.weight",
    "o": "layers.{i}.linear_attn.out_proj.weight",
    "decay.log": "layers.{i}.linear_attn.A_log",
    "decay.bias": "layers.{i}.linear_attn.dt_bias",
    "out_norm": "layers.{i}.linear_attn.norm.weight",
} | {f"conv.{part}": "layers.{i}.linear_attn.conv1d.weight" for part in ("q", "k", "v")}
NEXT_DELTA = (
    _SHARED
    | dict.fromkeys(("q", "k", "v", "gate"), "layers.{i}.linear_attn.in_proj_qkvz.weight")
    | dict.fromkeys(("a", "b"), "layers.{i}.linear_attn.in_proj_ba.weight")
)
QWEN35_DELTA = (
    _SHARED
    | dict.fromkeys(("q", "k", "v"), "layers.{i}.linear_attn.in_proj_qkv.weight")
    | {"gate": "layers.{i}.linear_attn.in_proj_z.weight"}
    | {part: f"layers.{{i}}.linear_attn.in_proj_{part}.weight" for part in ("a", "b")}
)
# Published files hold all experts of a layer in one tensor; what transformers saves has a tensor for each.
EXPERTS = QWEN2_EXPERTS | {
    "gate": QWEN2_EXPERTS["gate"] + "|layers.{i}.mlp.experts.gate_up_proj[expert.gate]",
    "up": QWEN2_EXPERTS["up"] + "|layers.{i}.mlp.experts.gate_up_proj[expert.up]",
    "down": QWEN2_EXPERTS["down"] + "|layers.{i}.mlp.experts.down_proj[expert]",
}

_GGUF_SHARED = {
    "norm": "blk.{i}.attn_norm.weight",
    "gate": "blk.{i}.attn_gate.weight",
    "o": "blk.{i}.ssm_out.weight",
    "decay": "blk.{i}.ssm_a",
    "decay.bias": "blk.{i}.ssm_dt.bias",
    "out_norm": "blk.{i}.ssm_norm.weight",
} | dict.fromkeys(("q", "k", "v"), "blk.{i}.attn_qkv.weight") | {
    f"conv.{part}": "blk.{i}.ssm_conv1d.weight" for part in ("q", "k", "v")
}  # fmt: skip
GGUF_DELTA = _GGUF_SHARED | {"a": "blk.{i}.ssm_alpha.weight", "b": "blk.{i}.ssm_beta.weight"}
GGUF_NEXT_DELTA = _GGUF_SHARED | dict.fromkeys(("a", "b"), "blk.{i}.ssm_ba.weight")
GGUF_GATED_ATTENTION = GGUF_ATTENTION | GGUF_HEAD_NORMS | {"gate": GGUF_ATTENTION["q"]}
_GGUF_NORM = {"norm": "blk.{i}.post_attention_norm.weight"}
GGUF_DELTA_FFN = GGUF_FFN | _GGUF_NORM
GGUF_DELTA_EXPERTS = (
    GGUF_EXPERTS
    | GGUF_GATED_SHARED
    | _GGUF_NORM
    | {part: f"{GGUF_EXPERTS[part]}|blk.{{i}}.ffn_gate_up_exps.weight[expert.{part}]" for part in ("gate", "up")}
)

"""Tensor names of the families with short convolutions, in Hugging Face directories and in GGUF files."""

from tpi.families.expertnames import GGUF_EXPERTS
from tpi.families.names import GGUF_ATTENTION, GGUF_HEAD_NORMS, QWEN3_ATTENTION

# A fused tensor has the rows of the input gate, of the output gate, and of the values.
_THIRDS = {"input": "first", "gate": "second", "v": "third"}


def _block(norm: str, fused: str, out: str, taps: str) -> dict[str, str]:
    return {part: f"{fused}[{third}]" for part, third in _THIRDS.items()} | {"norm": norm, "o": out, "conv": taps}


_NORM = {"norm": "layers.{i}.operator_norm.weight"}
CONV = _block(
    _NORM["norm"],
    "layers.{i}.conv.in_proj.weight",
    "layers.{i}.conv.out_proj.weight",
    "layers.{i}.conv.conv.weight",
)
ATTENTION = (
    _NORM
    | {part: f"layers.{{i}}.self_attn.{part}_proj.weight" for part in ("q", "k", "v")}
    | {f"{part}_norm": f"layers.{{i}}.self_attn.{part}_layernorm.weight" for part in ("q", "k")}
    | {"o": "layers.{i}.self_attn.out_proj.weight"}
)
_FFN_NORM = {"norm": "layers.{i}.ffn_norm.weight"}
_NUMBERS = {"gate": "w1", "up": "w3", "down": "w2"}
FFN = _FFN_NORM | {part: f"layers.{{i}}.feed_forward.{name}.weight" for part, name in _NUMBERS.items()}
EXPERTS = (
    _FFN_NORM
    | {part: f"layers.{{i}}.feed_forward.experts.{{e}}.{name}.weight" for part, name in _NUMBERS.items()}
    | {
        "router": "layers.{i}.feed_forward.gate.weight",
        "router.choice": "layers.{i}.feed_forward.expert_bias?use_expert_bias",
    }
)
FINAL = {"norm": "embedding_norm.weight"}
_MIXER_NORMS = _NORM | {"post_norm": "layers.{i}.post_operator_norm.weight?use_sandwich_norm"}
LFM3_CONV = CONV | _MIXER_NORMS
LFM3_ATTENTION = (
    QWEN3_ATTENTION
    | _MIXER_NORMS
    | {"gate": "|".join(f"layers.{{i}}.self_attn.{name}.weight?use_attention_gate" for name in ("gate_proj", "g_proj"))}
)
LFM3_FFN = FFN | {"post_norm": "layers.{i}.post_ffn_norm.weight?use_sandwich_norm"}

GGUF_CONV = _block(
    "blk.{i}.attn_norm.weight",
    "blk.{i}.shortconv.in_proj.weight",
    "blk.{i}.shortconv.out_proj.weight",
    "blk.{i}.shortconv.conv.weight",
)
GGUF_CONV_ATTENTION = GGUF_ATTENTION | GGUF_HEAD_NORMS
GGUF_CONV_EXPERTS = GGUF_EXPERTS | {"router.choice": "blk.{i}.exp_probs_b.bias"}
GGUF_FINAL = {"norm": "token_embd_norm.weight"}

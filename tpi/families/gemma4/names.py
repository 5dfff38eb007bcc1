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
GGUF_ATTENTION = (
    GGUF_GEMMA_ATTENTION | GGUF_HEAD_NORMS | {"v": "blk.{i}.attn_v.weight|blk.{i}.attn_k.weight"}
)  # without values of their own, a layer's keys before their norm are its values
GGUF_FFN = GGUF_GEMMA_FFN | {"layer_scale": "blk.{i}.layer_output_scale.weight?"}

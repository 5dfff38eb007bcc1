"""The table of families with latent attention, and their tensor names."""

from dataclasses import replace

from tpi.families.base import Family
from tpi.families.expertnames import GGUF_EXPERTS, GGUF_SHARED, QWEN_EXPERTS
from tpi.families.latent import defaults, settings
from tpi.families.latent.ggufsettings import adapt_gguf_refs, gguf_settings
from tpi.families.names import GGUF_ATTENTION, GGUF_FFN, MISTRAL_ATTENTION, MISTRAL_FFN
from tpi.families.sharednames import GGUF_MTP, MTP, gguf_names, llama_names

ATTENTION = MISTRAL_ATTENTION | {
    "latent": "layers.{i}.self_attn.kv_a_proj_with_mqa.weight",
    "latent.bias": "layers.{i}.self_attn.kv_a_proj_with_mqa.bias?attention_bias",
    "latent.norm": "layers.{i}.self_attn.kv_a_layernorm.weight",
    "k": "layers.{i}.self_attn.kv_b_proj.weight",
    "v": "layers.{i}.self_attn.kv_b_proj.weight",
    "o.bias": "layers.{i}.self_attn.o_proj.bias?attention_bias",
}
EXPERTS = QWEN_EXPERTS | {
    f"shared.{part}": f"layers.{{i}}.mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")
}
CORRECTED_EXPERTS = EXPERTS | {"router.choice": "layers.{i}.mlp.gate.e_score_correction_bias"}
GGUF_LATENT_ATTENTION = {name: GGUF_ATTENTION[name] for name in ("norm", "q", "o")} | {
    "latent": "blk.{i}.attn_kv_a_mqa.weight",
    "latent.norm": "blk.{i}.attn_kv_a_norm.weight",
    "k": "blk.{i}.attn_kv_b.weight",
    "v": "blk.{i}.attn_kv_b.weight",
}
GGUF_CORRECTED_EXPERTS = GGUF_EXPERTS | GGUF_SHARED | {"router.choice": "blk.{i}.exp_probs_b.bias?"}

LATENT = (
    Family(
        "deepseek2",
        architectures=("DeepseekV2ForCausalLM",),
        gguf="deepseek2",
        names=llama_names(ATTENTION, MISTRAL_FFN, EXPERTS),
        gguf_names=replace(gguf_names(GGUF_LATENT_ATTENTION, GGUF_FFN, experts=GGUF_CORRECTED_EXPERTS), mtp=GGUF_MTP),
        defaults=defaults.V2,
        settings=settings.v2,
        flatten=defaults.v2,
        dense_layers=settings.dense,
        adapt_refs=settings.adapt_refs,
        gguf_settings=gguf_settings,
        adapt_gguf_refs=adapt_gguf_refs,
    ),
    Family(
        "deepseek3",
        architectures=("DeepseekV3ForCausalLM",),
        names=replace(llama_names(ATTENTION, MISTRAL_FFN, CORRECTED_EXPERTS), mtp=MTP),
        defaults=defaults.V3,
        settings=settings.v3,
        flatten=defaults.v3,
        dense_layers=settings.dense,
        adapt_refs=settings.adapt_refs,
    ),
    Family(
        "glm4_moe_lite",
        architectures=("Glm4MoeLiteForCausalLM",),
        names=replace(llama_names(ATTENTION, MISTRAL_FFN, CORRECTED_EXPERTS), mtp=MTP),
        defaults=defaults.GLM,
        settings=settings.glm,
        flatten=defaults.v3,
        dense_layers=settings.dense_glm,
        adapt_refs=settings.adapt_refs,
    ),
)

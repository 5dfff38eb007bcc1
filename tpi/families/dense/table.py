"""The table of the families of this folder, and their tensor names."""

from tpi.families.base import Family
from tpi.families.dense import defaults, settings
from tpi.families.dense.muse import MUSE
from tpi.families.names import (
    GGUF_ATTENTION,
    GGUF_FFN,
    GGUF_HEAD_NORMS,
    LLAMA_ATTENTION,
    LLAMA_FFN,
    MISTRAL_ATTENTION,
    MISTRAL_FFN,
)
from tpi.families.sharednames import gguf_names, llama_names

ARCEE_FFN = {name: text for name, text in LLAMA_FFN.items() if not name.startswith("gate")}
GGUF_ARCEE_FFN = {name: text for name, text in GGUF_FFN.items() if not name.startswith("gate")}
SEED_ATTENTION = LLAMA_ATTENTION | {"o.bias": "layers.{i}.self_attn.o_proj.bias?attention_out_bias"}
GGUF_SEED_FFN = GGUF_FFN | {"norm": "blk.{i}.post_attention_norm.weight"}
ERNIE_ATTENTION = {name: text.replace("?attention_bias", "?use_bias") for name, text in LLAMA_ATTENTION.items()}
ERNIE_FFN = {name: text.replace("?mlp_bias", "?use_bias") for name, text in LLAMA_FFN.items()}
HUNYUAN_ATTENTION = LLAMA_ATTENTION | {
    "q_norm": "layers.{i}.self_attn.query_layernorm.weight",
    "k_norm": "layers.{i}.self_attn.key_layernorm.weight",
}

DENSE = (
    Family(
        "gemma",
        architectures=("GemmaForCausalLM",),
        gguf="gemma",
        names=llama_names(LLAMA_ATTENTION, MISTRAL_FFN),
        gguf_names=gguf_names(GGUF_ATTENTION, GGUF_FFN),
        defaults=defaults.GEMMA,
        settings=settings.gemma,
        gguf_settings=settings.gguf_gemma,
        norm_offset=1.0,
    ),
    Family(
        "arcee",
        architectures=("ArceeForCausalLM",),
        gguf="arcee",
        names=llama_names(LLAMA_ATTENTION, ARCEE_FFN),
        gguf_names=gguf_names(GGUF_ATTENTION, GGUF_ARCEE_FFN),
        defaults=defaults.ARCEE,
        settings=settings.arcee,
        gguf_settings=lambda fields: {"gated": False, "activation": "relu2"},
        interleaved_rope=True,
    ),
    Family(
        "seedoss",
        architectures=("SeedOssForCausalLM",),
        gguf="seed_oss",
        names=llama_names(SEED_ATTENTION, LLAMA_FFN),
        gguf_names=gguf_names(GGUF_ATTENTION, GGUF_SEED_FFN),
        defaults=defaults.SEED_OSS,
    ),
    Family(
        "ministral3",
        architectures=("Ministral3ForCausalLM",),
        gguf="mistral3",
        names=llama_names(MISTRAL_ATTENTION, MISTRAL_FFN),
        gguf_names=gguf_names(GGUF_ATTENTION, GGUF_FFN),
        defaults=defaults.MINISTRAL3,
        settings=settings.ministral3,
        gguf_settings=settings.gguf_ministral3,
        flatten=defaults.ministral3,
        interleaved_rope=True,
    ),
    Family(
        "ernie45",
        architectures=("Ernie4_5ForCausalLM",),
        gguf="ernie4_5",
        names=llama_names(ERNIE_ATTENTION, ERNIE_FFN),
        gguf_names=gguf_names(GGUF_ATTENTION, GGUF_FFN),
        defaults=defaults.ERNIE,
        adapt_refs=settings.interleaved,
        interleaved_rope=True,
    ),
    Family(
        "hunyuan",
        architectures=("HunYuanDenseV1ForCausalLM",),
        gguf="hunyuan-dense",
        names=llama_names(HUNYUAN_ATTENTION, MISTRAL_FFN),
        gguf_names=gguf_names(GGUF_ATTENTION | GGUF_HEAD_NORMS, GGUF_FFN),
        defaults=defaults.HUNYUAN,
        settings=settings.hunyuan,
        gguf_settings=settings.hunyuan,
        flatten=defaults.hunyuan,
    ),
    MUSE,
)

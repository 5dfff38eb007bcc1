"""The table of all families. A family that differs from others only in tensor names takes a few lines."""

from tpi.families import settings
from tpi.families.afternorm.table import AFTERNORM
from tpi.families.base import Family, Names
from tpi.families.conv.table import CONVOLUTIONS
from tpi.families.delta.table import DELTA
from tpi.families.dense.table import DENSE
from tpi.families.expertnames import GGUF_EXPERTS
from tpi.families.gemma4.table import GEMMA4
from tpi.families.gguf import experts as ggufexperts
from tpi.families.gguf import settings as ggufsettings
from tpi.families.huggingface import defaults
from tpi.families.latent.table import LATENT
from tpi.families.mamba.table import MAMBA
from tpi.families.mixtures import MIXTURES
from tpi.families.names import (
    GEMMA2_ATTENTION,
    GEMMA2_FFN,
    GEMMA3_ATTENTION,
    GGUF_ATTENTION,
    GGUF_FFN,
    GGUF_FUSED_ATTENTION,
    GGUF_FUSED_FFN,
    GGUF_GEMMA_ATTENTION,
    GGUF_GEMMA_FFN,
    GGUF_HEAD_NORMS,
    GGUF_OPT_ATTENTION,
    GGUF_OPT_FFN,
    LLAMA_ATTENTION,
    LLAMA_FFN,
    MISTRAL_ATTENTION,
    MISTRAL_FFN,
    OPT_ATTENTION,
    OPT_FFN,
    PHI3_ATTENTION,
    PHI3_FFN,
    QWEN2_ATTENTION,
    QWEN3_ATTENTION,
)
from tpi.families.relu.settings import llama_activation
from tpi.families.relu.table import RELU
from tpi.families.routed.table import ROUTED
from tpi.families.sharednames import gguf_names, llama_names

FAMILIES = (
    Family(
        "llama",
        architectures=("LlamaForCausalLM",),
        gguf="llama",
        names=llama_names(LLAMA_ATTENTION, LLAMA_FFN),
        gguf_names=gguf_names(GGUF_ATTENTION, GGUF_FFN, experts=GGUF_EXPERTS),
        gguf_settings=ggufexperts.llama,
        defaults=defaults.LLAMA | {"hidden_act_param": None},
        settings=llama_activation,
        interleaved_rope=True,
    ),
    Family(
        "mistral",
        architectures=("MistralForCausalLM",),
        names=llama_names(MISTRAL_ATTENTION, MISTRAL_FFN),
        defaults=defaults.MISTRAL,
        settings=settings.mistral,
    ),
    Family(
        "ministral",
        architectures=("MinistralForCausalLM",),
        names=llama_names(MISTRAL_ATTENTION, MISTRAL_FFN),
        defaults=defaults.MINISTRAL,
        settings=settings.ministral,
    ),
    Family(
        "smollm3",
        architectures=("SmolLM3ForCausalLM",),
        gguf="smollm3",
        gguf_names=gguf_names(GGUF_ATTENTION, GGUF_FFN),
        gguf_settings=ggufsettings.smollm3,
        interleaved_rope=True,
        names=llama_names(LLAMA_ATTENTION, LLAMA_FFN),
        defaults=defaults.SMOLLM3,
        settings=settings.smollm3,
    ),
    Family(
        "granite",
        architectures=("GraniteForCausalLM",),
        gguf="granite",
        gguf_names=gguf_names(GGUF_ATTENTION, GGUF_FFN),
        gguf_settings=ggufsettings.dense_granite,
        interleaved_rope=True,
        names=llama_names(LLAMA_ATTENTION, LLAMA_FFN),
        defaults=defaults.GRANITE,
        settings=settings.granite,
    ),
    Family(
        "gemma3",
        architectures=("Gemma3ForCausalLM",),
        gguf="gemma3",
        gguf_names=gguf_names(GGUF_GEMMA_ATTENTION | GGUF_HEAD_NORMS, GGUF_GEMMA_FFN, factors=()),
        gguf_settings=ggufsettings.gemma3,
        names=llama_names(GEMMA3_ATTENTION, GEMMA2_FFN),
        defaults=defaults.GEMMA3,
        settings=settings.gemma3,
        norm_offset=1.0,
    ),
    Family(
        "qwen2",
        architectures=("Qwen2ForCausalLM",),
        gguf="qwen2",
        names=llama_names(QWEN2_ATTENTION, MISTRAL_FFN),
        gguf_names=gguf_names(
            GGUF_ATTENTION | {f"{part}.bias": f"blk.{{i}}.attn_{part}.bias" for part in ("q", "k", "v")}, GGUF_FFN
        ),
        defaults=defaults.QWEN2,
        settings=settings.qwen2,
        gguf_settings=ggufsettings.no_layer_slides,
    ),
    Family(
        "qwen3",
        architectures=("Qwen3ForCausalLM",),
        gguf="qwen3",
        names=llama_names(QWEN3_ATTENTION, MISTRAL_FFN),
        gguf_names=gguf_names(GGUF_ATTENTION | GGUF_HEAD_NORMS, GGUF_FFN),
        defaults=defaults.QWEN3,
        settings=settings.qwen2,
        gguf_settings=ggufsettings.no_layer_slides,
    ),
    Family(
        "phi3",
        architectures=("Phi3ForCausalLM",),
        gguf="phi3",
        names=llama_names(PHI3_ATTENTION, PHI3_FFN),
        gguf_names=gguf_names(GGUF_FUSED_ATTENTION, GGUF_FUSED_FFN),
        defaults=defaults.PHI3,
        settings=settings.phi3,
        gguf_settings=ggufsettings.every_layer_slides,
    ),
    Family(
        "gemma2",
        architectures=("Gemma2ForCausalLM",),
        gguf="gemma2",
        names=llama_names(GEMMA2_ATTENTION, GEMMA2_FFN),
        gguf_names=gguf_names(GGUF_GEMMA_ATTENTION, GGUF_GEMMA_FFN),
        defaults=defaults.GEMMA2,
        settings=settings.gemma2,
        gguf_settings=ggufsettings.gemma2,
        norm_offset=1.0,
    ),
    Family(
        "opt",
        architectures=("OPTForCausalLM",),
        names=Names(
            "embed_tokens.weight",
            OPT_ATTENTION,
            OPT_FFN,
            {"norm": "final_layer_norm.weight", "norm.bias": "final_layer_norm.bias"},
            "lm_head.weight",
            positions="embed_positions.weight",
            prefixes=("model.decoder.", "decoder.", ""),
        ),
        defaults=defaults.OPT,
        settings=settings.opt,
        gguf="opt",  # only in PowerInfer's files
        gguf_names=Names(
            "token_embd.weight",
            GGUF_OPT_ATTENTION,
            GGUF_OPT_FFN,
            {"norm": "output_norm.weight", "norm.bias": "output_norm.bias"},
            "output.weight",
            positions="position_embd.weight",
        ),
        gguf_settings=ggufsettings.opt,
    ),
    *RELU,
    *MIXTURES,
    *LATENT,
    *DELTA,
    *GEMMA4,
    *DENSE,
    *AFTERNORM,
    *ROUTED,
    *CONVOLUTIONS,
    *MAMBA,
)

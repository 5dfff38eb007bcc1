"""The families with experts. They differ in tensor names and in the settings of `tpi.families.experts`."""

from tpi.families import experts
from tpi.families.base import Family, Names
from tpi.families.expertnames import (
    DBRX_ATTENTION,
    DBRX_EXPERTS,
    GGUF_EXPERTS,
    GGUF_GATED_SHARED,
    GGUF_GPT_OSS_ATTENTION,
    GGUF_GPT_OSS_EXPERTS,
    GGUF_OLMOE_ATTENTION,
    GGUF_SHARED,
    GPT_OSS_ATTENTION,
    GPT_OSS_EXPERTS,
    GRANITE_EXPERTS,
    MIXTRAL_EXPERTS,
    OLMOE_ATTENTION,
    QWEN2_EXPERTS,
    QWEN2_MOE_ATTENTION,
    QWEN_EXPERTS,
)
from tpi.families.gguf import experts as ggufexperts
from tpi.families.huggingface import dbrx, expertdefaults
from tpi.families.names import (
    GGUF_ATTENTION,
    GGUF_FFN,
    GGUF_FUSED_ATTENTION,
    GGUF_HEAD_NORMS,
    LLAMA_ATTENTION,
    MISTRAL_ATTENTION,
    MISTRAL_FFN,
    QWEN3_ATTENTION,
)
from tpi.families.sharednames import gguf_names, llama_names

MIXTURES = (
    Family(
        "mixtral",
        architectures=("MixtralForCausalLM",),
        names=llama_names(MISTRAL_ATTENTION, {}, MIXTRAL_EXPERTS),
        defaults=expertdefaults.MIXTRAL,
        settings=experts.mixtral,
        flatten=expertdefaults.num_local_experts,
    ),
    Family(
        "qwen2moe",
        architectures=("Qwen2MoeForCausalLM",),
        gguf="qwen2moe",
        names=llama_names(QWEN2_MOE_ATTENTION, MISTRAL_FFN, QWEN2_EXPERTS),
        gguf_names=gguf_names(GGUF_ATTENTION, GGUF_FFN, experts=GGUF_EXPERTS | GGUF_GATED_SHARED),
        defaults=expertdefaults.QWEN2,
        settings=experts.qwen2,
        gguf_settings=ggufexperts.qwen2,
        dense_layers=experts.dense_qwen,
    ),
    Family(
        "qwen3moe",
        architectures=("Qwen3MoeForCausalLM",),
        gguf="qwen3moe",
        names=llama_names(QWEN3_ATTENTION, MISTRAL_FFN, QWEN_EXPERTS),
        gguf_names=gguf_names(GGUF_ATTENTION | GGUF_HEAD_NORMS, GGUF_FFN, experts=GGUF_EXPERTS),
        defaults=expertdefaults.QWEN3,
        settings=experts.qwen3,
        flatten=expertdefaults.num_experts,
        gguf_settings=ggufexperts.qwen3,
        dense_layers=experts.dense_qwen,
    ),
    Family(
        "granitemoe",
        architectures=("GraniteMoeForCausalLM",),
        gguf="granitemoe",
        names=llama_names(LLAMA_ATTENTION, {}, GRANITE_EXPERTS),
        gguf_names=gguf_names(GGUF_ATTENTION, GGUF_FFN, experts=GGUF_EXPERTS | GGUF_SHARED),
        defaults=expertdefaults.GRANITE,
        settings=experts.granite,
        gguf_settings=ggufexperts.granite,
        interleaved_rope=True,
    ),
    Family(
        "olmoe",
        architectures=("OlmoeForCausalLM",),
        gguf="olmoe",
        names=llama_names(OLMOE_ATTENTION, {}, QWEN_EXPERTS),
        gguf_names=gguf_names(GGUF_OLMOE_ATTENTION, {}, experts=GGUF_EXPERTS),
        defaults=expertdefaults.OLMOE,
        settings=experts.olmoe,
        flatten=expertdefaults.num_experts,
        gguf_settings=ggufexperts.olmoe,
    ),
    Family(
        "gptoss",
        architectures=("GptOssForCausalLM",),
        gguf="gpt-oss",
        names=llama_names(GPT_OSS_ATTENTION, {}, GPT_OSS_EXPERTS),
        gguf_names=gguf_names(GGUF_GPT_OSS_ATTENTION, {}, experts=GGUF_GPT_OSS_EXPERTS),
        defaults=expertdefaults.GPT_OSS,
        settings=experts.gpt_oss,
        flatten=expertdefaults.gpt_oss,
        gguf_settings=ggufexperts.gpt_oss,
        adapt_refs=experts.unquantised_gpt_oss,
    ),
    Family(
        "dbrx",
        architectures=("DbrxForCausalLM",),
        gguf="dbrx",
        names=Names(
            "wte.weight",
            DBRX_ATTENTION,
            {},
            {"norm": "norm_f.weight"},
            "lm_head.weight",
            prefixes=("transformer.", ""),
            experts=DBRX_EXPERTS,
        ),
        gguf_names=gguf_names(
            GGUF_FUSED_ATTENTION, {}, experts=GGUF_EXPERTS | {"norm": "blk.{i}.attn_output_norm.weight"}
        ),
        defaults=expertdefaults.DBRX,
        settings=experts.dbrx,
        flatten=dbrx.flat,
        gguf_settings=ggufexperts.dbrx,
    ),
)

"""The table of families with DeltaNet layers."""

from dataclasses import replace

from tpi.families.base import Family
from tpi.families.delta import defaults, gguf, settings
from tpi.families.delta.names import (
    EXPERTS,
    GATED_ATTENTION,
    GGUF_DELTA,
    GGUF_DELTA_EXPERTS,
    GGUF_DELTA_FFN,
    GGUF_GATED_ATTENTION,
    GGUF_NEXT_DELTA,
    NEXT_DELTA,
    QWEN35_DELTA,
)
from tpi.families.experts import dense_qwen
from tpi.families.huggingface.expertdefaults import num_experts
from tpi.families.names import MISTRAL_FFN
from tpi.families.sharednames import GGUF_MTP, MTP_APART, gguf_names, llama_names, with_mtp

DELTA = (
    Family(
        "qwen35",
        architectures=("Qwen3_5ForCausalLM",),
        gguf="qwen35",
        gguf_names=replace(gguf_names(GGUF_GATED_ATTENTION, GGUF_DELTA_FFN), recurrent=GGUF_DELTA, mtp=GGUF_MTP),
        gguf_settings=gguf.dense,
        adapt_gguf_refs=gguf.adapt_refs,
        names=with_mtp(replace(llama_names(GATED_ATTENTION, MISTRAL_FFN), recurrent=QWEN35_DELTA), MTP_APART),
        defaults=defaults.QWEN35,
        settings=settings.dense,
        adapt_refs=settings.adapt_refs,
        norm_offset=1.0,
    ),
    Family(
        "qwen35moe",
        architectures=("Qwen3_5MoeForCausalLM",),
        gguf="qwen35moe",
        gguf_names=replace(
            gguf_names(GGUF_GATED_ATTENTION, {}, experts=GGUF_DELTA_EXPERTS), recurrent=GGUF_DELTA, mtp=GGUF_MTP
        ),
        gguf_settings=gguf.experts,
        adapt_gguf_refs=gguf.adapt_refs,
        names=with_mtp(replace(llama_names(GATED_ATTENTION, {}, EXPERTS), recurrent=QWEN35_DELTA), MTP_APART),
        defaults=defaults.QWEN35_MOE,
        settings=settings.experts,
        adapt_refs=settings.adapt_refs,
        flatten=num_experts,
        norm_offset=1.0,
    ),
    Family(
        "qwen3next",
        architectures=("Qwen3NextForCausalLM",),
        gguf="qwen3next",
        gguf_names=replace(
            gguf_names(GGUF_GATED_ATTENTION, GGUF_DELTA_FFN, experts=GGUF_DELTA_EXPERTS),
            recurrent=GGUF_NEXT_DELTA,
            mtp=GGUF_MTP,
        ),
        gguf_settings=gguf.experts,
        adapt_gguf_refs=gguf.adapt_next_refs,
        names=with_mtp(replace(llama_names(GATED_ATTENTION, MISTRAL_FFN, EXPERTS), recurrent=NEXT_DELTA), MTP_APART),
        defaults=defaults.NEXT,
        settings=settings.experts,
        adapt_refs=settings.adapt_next_refs,
        flatten=num_experts,
        dense_layers=dense_qwen,
        norm_offset=1.0,
    ),
)

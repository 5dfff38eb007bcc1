"""The table of families with short convolutions."""

from dataclasses import replace

from tpi.families.base import Family
from tpi.families.conv import defaults, gguf, settings
from tpi.families.conv.names import (
    ATTENTION,
    CONV,
    EXPERTS,
    FFN,
    FINAL,
    GGUF_CONV,
    GGUF_CONV_ATTENTION,
    GGUF_CONV_EXPERTS,
    GGUF_FINAL,
    LFM3_ATTENTION,
    LFM3_CONV,
    LFM3_FFN,
)
from tpi.families.names import GGUF_FFN
from tpi.families.sharednames import gguf_names, llama_names

CONVOLUTIONS = (
    Family(
        "lfm2",
        architectures=("Lfm2ForCausalLM",),
        gguf="lfm2",
        gguf_names=replace(gguf_names(GGUF_CONV_ATTENTION, GGUF_FFN), recurrent=GGUF_CONV, final=GGUF_FINAL),
        gguf_settings=gguf.dense,
        names=replace(llama_names(ATTENTION, FFN), recurrent=CONV, final=FINAL),
        defaults=defaults.LFM2,
        settings=settings.dense,
        flatten=defaults.older_dense,
    ),
    Family(
        "lfm2moe",
        architectures=("Lfm2MoeForCausalLM",),
        gguf="lfm2moe",
        gguf_names=replace(
            gguf_names(GGUF_CONV_ATTENTION, GGUF_FFN, experts=GGUF_CONV_EXPERTS),
            recurrent=GGUF_CONV,
            final=GGUF_FINAL,
        ),
        gguf_settings=gguf.experts,
        names=replace(llama_names(ATTENTION, FFN, EXPERTS), recurrent=CONV, final=FINAL),
        defaults=defaults.LFM2_MOE,
        settings=settings.experts,
        flatten=defaults.older_experts,
        dense_layers=settings.dense_layers,
    ),
    Family(
        "lfm3",
        architectures=("Lfm3ForCausalLM",),
        names=replace(llama_names(LFM3_ATTENTION, LFM3_FFN), recurrent=LFM3_CONV, final=FINAL),
        defaults=defaults.LFM3,
        settings=settings.lfm3,
        flatten=defaults.lfm3,
        adapt_refs=settings.adapt_lfm3_refs,
    ),
)

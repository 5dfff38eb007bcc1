"""The table of families with Mamba2 layers."""

from dataclasses import replace

from tpi.families.base import Family
from tpi.families.mamba import defaults, gguf, names, settings
from tpi.families.names import GGUF_ATTENTION, GGUF_FFN, LLAMA_ATTENTION
from tpi.families.routed.table import GRANITE_SHARED_EXPERTS
from tpi.families.sharednames import gguf_names, llama_names

MAMBA = (
    Family(
        "granitehybrid",
        architectures=("GraniteMoeHybridForCausalLM",),
        gguf="granitehybrid",
        gguf_names=replace(
            gguf_names(GGUF_ATTENTION, GGUF_FFN, experts=names.GGUF_GRANITE_EXPERTS), recurrent=names.GGUF
        ),
        gguf_settings=gguf.granite_hybrid,
        adapt_gguf_refs=settings.adapt_refs,
        interleaved_rope=True,
        names=replace(llama_names(LLAMA_ATTENTION, names.GRANITE_FFN, GRANITE_SHARED_EXPERTS), recurrent=names.GRANITE),
        defaults=defaults.GRANITE_HYBRID,
        settings=settings.granite_hybrid,
        adapt_refs=settings.adapt_refs,
        flatten=defaults.granite_hybrid,
    ),
)

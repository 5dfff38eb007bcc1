"""The table of Gemma 4's families."""

from tpi.families.base import Family
from tpi.families.gemma4 import defaults, gguf, settings
from tpi.families.gemma4.names import ATTENTION, EXPERTS, FFN, GGUF_ATTENTION, GGUF_EXPERTS, GGUF_FFN
from tpi.families.gguf.rope import FREQS
from tpi.families.sharednames import gguf_names, llama_names

GEMMA4 = (
    Family(
        "gemma4",
        architectures=("Gemma4ForCausalLM",),
        gguf="gemma4",
        gguf_names=gguf_names(GGUF_ATTENTION, GGUF_FFN, factors=(FREQS,), experts=GGUF_EXPERTS),
        gguf_settings=gguf.gemma4,
        adapt_gguf_refs=gguf.check_factors,
        names=llama_names(ATTENTION, FFN, EXPERTS),
        defaults=defaults.GEMMA4,
        settings=settings.gemma4,
        adapt_refs=settings.adapt_refs,
        flatten=settings.flatten,
    ),
    Family(
        "gemma4unified",
        architectures=("Gemma4UnifiedForCausalLM",),
        names=llama_names(ATTENTION, FFN),
        defaults=defaults.UNIFIED,
        settings=settings.gemma4,
        adapt_refs=settings.adapt_refs,
        flatten=settings.flatten,
    ),
)

"""The table of Gemma 4's families."""

from dataclasses import replace

from tpi.families.base import Family, Names
from tpi.families.gemma4 import defaults, gguf, names, settings
from tpi.families.gguf.rope import FREQS
from tpi.families.sharednames import gguf_names, llama_names


def _with_embeddings(found: Names, per_layer: tuple[str, str], norm: str) -> Names:
    """Return `found` with the tensor names of per-layer embeddings, and of the norm of their projection."""
    return replace(found, per_layer=per_layer, final={**found.final, "per_layer.first_norm": norm})


GEMMA4 = (
    Family(
        "gemma4",
        architectures=("Gemma4ForCausalLM",),
        gguf="gemma4",
        gguf_names=_with_embeddings(
            gguf_names(names.GGUF_ATTENTION, names.GGUF_FFN, factors=(FREQS,), experts=names.GGUF_EXPERTS),
            names.GGUF_PER_LAYER,
            names.GGUF_FIRST_NORM,
        ),
        gguf_settings=gguf.gemma4,
        adapt_gguf_refs=gguf.adapt_refs,
        names=_with_embeddings(
            llama_names(names.ATTENTION, names.FFN, names.EXPERTS), names.PER_LAYER, names.FIRST_NORM
        ),
        defaults=defaults.GEMMA4,
        settings=settings.gemma4,
        adapt_refs=settings.adapt_refs,
        flatten=settings.flatten,
    ),
    Family(
        "gemma4unified",
        architectures=("Gemma4UnifiedForCausalLM",),
        names=llama_names(names.ATTENTION, names.FFN),
        defaults=defaults.UNIFIED,
        settings=settings.gemma4,
        adapt_refs=settings.adapt_refs,
        flatten=settings.flatten,
    ),
)

"""The table of families with ReLU, and their tensor names."""

from collections.abc import Mapping

from tpi.families.base import Family, Names
from tpi.families.gguf.rope import FREQS
from tpi.families.names import (
    GGUF_ATTENTION,
    GGUF_FFN,
    LLAMA_ATTENTION,
    LLAMA_FFN,
    MISTRAL_ATTENTION,
    MISTRAL_FFN,
)
from tpi.families.relu import defaults, settings
from tpi.families.relu.falcon import FALCON

NEMOTRON_ATTENTION = LLAMA_ATTENTION | {"norm.bias": "layers.{i}.input_layernorm.bias"}
NEMOTRON_FFN = {name: text for name, text in LLAMA_FFN.items() if not name.startswith("gate")} | {
    "norm.bias": "layers.{i}.post_attention_layernorm.bias"
}


def _names(attention: Mapping[str, str], ffn: Mapping[str, str], bias: bool = False) -> Names:
    """Return the names for a Hugging Face directory.

    `attention` and `ffn` are the templates of these blocks. `bias` is True if the final norm has a bias.
    """
    final = {"norm": "norm.weight"} | ({"norm.bias": "norm.bias"} if bias else {})
    return Names(
        "embed_tokens.weight",
        attention,
        ffn,
        final,
        "lm_head.weight",
        prefixes=("model.", ""),
        ignored_tensors=("*.rotary_emb.inv_freq",),
    )


RELU = (
    Family(
        "bamboo",
        architectures=("BambooForCausalLM",),
        names=_names(MISTRAL_ATTENTION, MISTRAL_FFN),
        defaults=defaults.BAMBOO,
        settings=settings.bamboo,
        gguf="bamboo",  # only in PowerInfer's files
        gguf_names=Names(
            "token_embd.weight",
            GGUF_ATTENTION,
            GGUF_FFN,
            {"norm": "output_norm.weight"},
            "output.weight",
            ignored_tensors=(FREQS,),
        ),
        gguf_settings=lambda fields: {"activation": "drelu"},
        interleaved_rope=True,
    ),
    Family(
        "prosparse",
        architectures=("SparseLlamaForCausalLM",),
        names=_names(LLAMA_ATTENTION, LLAMA_FFN),
        defaults=defaults.PROSPARSE,
        settings=settings.prosparse,
    ),
    Family(
        "nemotron",
        architectures=("NemotronForCausalLM",),
        names=_names(NEMOTRON_ATTENTION, NEMOTRON_FFN, bias=True),
        defaults=defaults.NEMOTRON,
        settings=settings.nemotron,
        norm_offset=1.0,
    ),
    FALCON,
)

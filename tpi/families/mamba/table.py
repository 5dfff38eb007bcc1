"""The table of families with Mamba2 layers."""

from dataclasses import replace

from tpi.families.base import Family, Names
from tpi.families.mamba import defaults, gguf, names, nemotron, settings
from tpi.families.names import GGUF_ATTENTION, GGUF_FFN, LLAMA_ATTENTION
from tpi.families.routed.table import GRANITE_SHARED_EXPERTS
from tpi.families.sharednames import GGUF_MTP, gguf_names, llama_names, with_mtp

_NEMOTRON = Family(
    "nemotronh",
    architectures=("NemotronHForCausalLM",),
    gguf="nemotron_h",
    gguf_names=replace(gguf_names(GGUF_ATTENTION, names.GGUF_NEMOTRON_FFN), recurrent=names.GGUF),
    gguf_settings=gguf.nemotron,
    gguf_numbers=gguf.nemotron_numbers,
    adapt_gguf_refs=gguf.nemotron_refs,
    names=with_mtp(
        Names(
            "embeddings.weight",
            names.NEMOTRON_ATTENTION,
            names.NEMOTRON_FFN,
            {"norm": "norm_f.weight"},
            "lm_head.weight",
            prefixes=("backbone.", "model."),
            experts=names.NEMOTRON_EXPERTS,
            recurrent=names.NEMOTRON,
        ),
        names.NEMOTRON_MTP,
        ffn="mtp.layers.1.",
    ),
    defaults=defaults.NEMOTRON_H,
    settings=nemotron.nemotron,
    numbers=nemotron.numbers,
    dense_layers=nemotron.dense,
    adapt_refs=nemotron.with_parts,
    flatten=defaults.nemotron,
)
_GGUF_NEMOTRON = gguf_names(GGUF_ATTENTION, names.GGUF_NEMOTRON_FFN, experts=names.GGUF_NEMOTRON_EXPERTS)
_GGUF_NEMOTRON_MTP = replace(_GGUF_NEMOTRON, experts=names.GGUF_NEMOTRON_MTP_EXPERTS, mtp=GGUF_MTP)
MAMBA = (
    _NEMOTRON,
    replace(
        _NEMOTRON,
        name="nemotronhmoe",
        architectures=(),
        gguf="nemotron_h_moe",
        gguf_names=replace(_GGUF_NEMOTRON, recurrent=names.GGUF, apart=_GGUF_NEMOTRON_MTP),
    ),
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

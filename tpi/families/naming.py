"""How families put their names together: what most of them share beside the tables of `tpi.families.names`."""

from collections.abc import Mapping

from tpi.families.base import Names
from tpi.families.gguf.rope import FREQS, LONG, SHORT


def llama_names(
    attention: Mapping[str, str], ffn: Mapping[str, str], experts: Mapping[str, str] | None = None
) -> Names:
    """Those of a Hugging Face directory with Llama's tables and final norm."""
    return Names(
        "embed_tokens.weight",
        attention,
        ffn,
        {"norm": "norm.weight"},
        "lm_head.weight",
        prefixes=("model.", "", "language_model.model.", "model.language_model."),  # the last two beside a vision tower
        accounted=("*.rotary_emb.inv_freq",),
        experts=experts,
    )


def gguf_names(
    attention: Mapping[str, str],
    ffn: Mapping[str, str],
    factors: tuple[str, ...] = (FREQS, SHORT, LONG),
    experts: Mapping[str, str] | None = None,
) -> Names:
    """Those of a GGUF file; `factors` are its tensors of rotary factors, which were read for the configuration."""
    return Names(
        "token_embd.weight",
        attention,
        ffn,
        {"norm": "output_norm.weight"},
        "output.weight",
        accounted=factors,
        experts=experts,
    )

"""Tensor names that most families share, in addition to the tables of `tpi.families.names`."""

from collections.abc import Mapping

from tpi.families.base import Names
from tpi.families.gguf.rope import FREQS, LONG, SHORT

MTP = {
    "projection": "layers.{i}.eh_proj.weight",
    "token": "layers.{i}.enorm.weight",
    "hidden": "layers.{i}.hnorm.weight",
    "norm": "layers.{i}.shared_head.norm.weight",
}  # of the first layer for multi-token prediction, in the files of DeepSeek and GLM
GGUF_MTP = {
    "projection": "blk.{i}.nextn.eh_proj.weight",
    "token": "blk.{i}.nextn.enorm.weight",
    "hidden": "blk.{i}.nextn.hnorm.weight",
    "norm": "blk.{i}.nextn.shared_head_norm.weight",
}


def llama_names(
    attention: Mapping[str, str], ffn: Mapping[str, str], experts: Mapping[str, str] | None = None
) -> Names:
    """Return the names for a Hugging Face directory whose embedding, head and final norm are named as Llama's are.

    `attention`, `ffn` and `experts` are the templates of these blocks.
    """
    return Names(
        "embed_tokens.weight",
        attention,
        ffn,
        {"norm": "norm.weight"},
        "lm_head.weight",
        prefixes=(
            "model.",
            "",
            "language_model.model.",
            "model.language_model.",
        ),  # the last two if there is a vision tower
        ignored_tensors=("*.rotary_emb.inv_freq",),
        experts=experts,
    )


def gguf_names(
    attention: Mapping[str, str],
    ffn: Mapping[str, str],
    factors: tuple[str, ...] = (FREQS, SHORT, LONG),
    experts: Mapping[str, str] | None = None,
) -> Names:
    """Return the names for a GGUF file.

    `attention`, `ffn` and `experts` are the templates of these blocks. `factors` names the file's tensors of rotary
    factors, which the configuration uses.
    """
    return Names(
        "token_embd.weight",
        attention,
        ffn,
        {"norm": "output_norm.weight"},
        "output.weight",
        ignored_tensors=factors,
        experts=experts,
    )

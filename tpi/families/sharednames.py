"""Tensor names that most families share, in addition to the tables of `tpi.families.names`."""

from collections.abc import Mapping
from dataclasses import replace

from tpi.families.base import Names
from tpi.families.gguf.rope import FREQS, LONG, SHORT

MTP = {
    "projection": "layers.{i}.eh_proj.weight",
    "token": "layers.{i}.enorm.weight",
    "hidden": "layers.{i}.hnorm.weight",
    "norm": "layers.{i}.shared_head.norm.weight",
}  # names of the first layer for multi-token prediction in the files of DeepSeek and GLM
GGUF_MTP = {
    "projection": "blk.{i}.nextn.eh_proj.weight",
    "token": "blk.{i}.nextn.enorm.weight",
    "hidden": "blk.{i}.nextn.hnorm.weight",
    "norm": "blk.{i}.nextn.shared_head_norm.weight",
}
MTP_APART = {
    "projection": "mtp.fc.weight",
    "token": "mtp.pre_fc_norm_embedding.weight",
    "hidden": "mtp.pre_fc_norm_hidden.weight",
    "norm": "mtp.norm.weight",
}  # names of the same layer in the files of Qwen and EXAONE, where they begin with `mtp`


def with_mtp(names: Names, mtp: Mapping[str, str], block: str = "mtp.layers.0.", ffn: str = "") -> Names:
    """Return `names` with names of their own for the first layer for multi-token prediction, without the common prefix.

    Args:
        names: the templates of the names of the model's tensors.
        mtp: the names of the tensors that this layer has in addition to its blocks.
        block: the text that replaces `layers.{i}.` in the names of this layer's blocks.
        ffn: the same text for its feed-forward block or its experts; empty: the text of `block`.
    """

    def apart(templates: Mapping[str, str], begin: str) -> dict[str, str]:
        return {name: text.replace("layers.{i}.", begin) for name, text in templates.items()}

    attention, second = apart(names.attention, block), apart(names.ffn, ffn or block)
    experts = None if names.experts is None else apart(names.experts, ffn or block)
    return replace(names, apart=replace(names, attention=attention, ffn=second, experts=experts, mtp=mtp))


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

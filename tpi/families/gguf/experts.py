"""What the metadata of GGUF files says of experts, for each architecture that has some: fields of a ModelConfig.

Most architectures choose in one way, which files need not record. What a file says all the same counts: each of
llama.cpp's keys about experts is used here, asks for nothing, or refuses the file by its name.
"""

from typing import Any

from tpi.config import Mixture
from tpi.errors import ModelError
from tpi.families.base import Fields, count, number, whole
from tpi.families.gguf import settings

NOT_SAID, SOFTMAX, SIGMOID, OF_THOSE_CHOSEN = range(4)  # expert_gating_func in llama.cpp's numbers


def llama(fields: Fields) -> dict[str, Any]:
    """Llama, or Mixtral, whose architecture is Llama's: softmax over those that are chosen."""
    found = settings.every_layer_slides(fields)
    if not fields.get("expert_count"):
        return found
    return found | {"mixture": mixture(fields, normalised=True)}


def qwen2(fields: Fields) -> dict[str, Any]:
    """Qwen's, with its shared expert."""
    if (experts := whole(fields, "expert_shared_count", 1)) != 1:
        raise ModelError(f"expert_shared_count is {experts}; this architecture has 1")
    shared = whole(fields, "expert_shared_feed_forward_length", 0) or count(fields, "feed_forward_length")
    return {"mixture": mixture(fields, normalised=False, width=_share(fields), shared=shared)}


def qwen3(fields: Fields) -> dict[str, Any]:
    """Those chosen are normalised, which most files do not record."""
    return {"mixture": mixture(fields, normalised=True, width=_share(fields))}


def olmoe(fields: Fields) -> dict[str, Any]:
    """Softmax over all; queries, keys and values may be clipped."""
    clip = number(fields, "attention.clamp_kqv", 0.0)
    return {"mixture": mixture(fields, normalised=False), "whole_norms": True, "attention_clip": clip}


def granite(fields: Fields) -> dict[str, Any]:
    """Softmax over those that are chosen, and Granite's multipliers."""
    return settings.granite(fields) | {"mixture": mixture(fields, normalised=True)}


def gpt_oss(fields: Fields) -> dict[str, Any]:
    """Every other layer slides; the numbers of the clamped SwiGLU are llama.cpp's, since GGUF does not record them."""
    settings.check_local_base(fields)
    return {
        "mixture": mixture(fields, normalised=True),
        "activation": "swiglu_clamped",
        "activation_threshold": 7.0,
        "activation_slope": 1.702,
        **settings.every_other_slides(fields),
    }


def dbrx(fields: Fields) -> dict[str, Any]:
    """LayerNorm without a bias; queries, keys and values are clipped."""
    return {
        "norm": "layer",
        "norm_eps": number(fields, "attention.layer_norm_epsilon"),
        "attention_clip": number(fields, "attention.clamp_kqv", 0.0),
        "mixture": mixture(fields, normalised=True),
    }


def mixture(fields: Fields, normalised: bool, width: int | None = None, shared: int = 0) -> Mixture:
    """The experts that the metadata describes.

    Args:
        fields: the metadata.
        normalised: whether the scores of those chosen are divided by their sum, if the file does not say.
        width: neurons of an expert, if the file does not say; by default those of a feed-forward network.
        shared: neurons of what every token uses.

    Raises:
        ModelError: if experts are scored or grouped in a way that is not supported.
    """
    width = whole(fields, "expert_feed_forward_length", 0) or width or count(fields, "feed_forward_length")
    gating = whole(fields, "expert_gating_func", NOT_SAID)
    if gating not in (NOT_SAID, SOFTMAX, SIGMOID, OF_THOSE_CHOSEN):
        raise ModelError(f"expert_gating_func is {gating}; softmax and sigmoid are supported")
    groups, used = _groups(fields, gating)
    return Mixture(
        count(fields, "expert_count"),
        count(fields, "expert_used_count"),
        width,
        shared,
        scores="sigmoid" if gating == SIGMOID else "softmax",
        normalised=_flag(fields, "expert_weights_norm", normalised) or gating == OF_THOSE_CHOSEN,
        scale=number(fields, "expert_weights_scale", 1.0) or 1.0,
        groups=groups,
        groups_used=used,
        group_best=2 if groups > 1 else 1,
    )


def _groups(fields: Fields, gating: int) -> tuple[int, int]:
    """How many groups there are, and from how many of them experts are chosen; llama.cpp counts the two best of each.

    Raises:
        ModelError: if not all groups count and scores are a softmax: DeepSeek-V2 counts the best of each.
    """
    groups, used = whole(fields, "expert_group_count", 0) or 1, whole(fields, "expert_group_used_count", 0) or 1
    if groups == 1 or groups == used:
        return 1, 1
    if gating != SIGMOID:
        raise ModelError(
            f"expert_group_count is {groups} with scores that are no sigmoid, which programs take differently"
        )
    return groups, used


def _share(fields: Fields) -> int:
    """Neurons of an expert where only those of all that a token uses are given (older files of Qwen)."""
    return max(count(fields, "feed_forward_length") // count(fields, "expert_used_count"), 1)


def _flag(fields: Fields, key: str, default: bool) -> bool:
    value = fields.get(key, default)
    if type(value) is not bool:
        raise ModelError(f"{key} is {str(value)[:80]!r}; true or false is expected")
    return value

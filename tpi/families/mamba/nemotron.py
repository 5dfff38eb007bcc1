"""Settings of Nemotron-H and Nemotron 3, whose sources number blocks: Mamba2, attention, a network or experts.

In TPI, each block of Mamba2 or attention begins a layer; the networks and experts that follow belong to that layer.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

from tpi.config import Mamba, Mixture
from tpi.errors import ModelError
from tpi.families.base import Fields, Model, Numbers, activation, float_field, size_field
from tpi.families.experts import sigmoid_mixture
from tpi.families.mamba.settings import adapt_refs
from tpi.families.settings import bool_field

Kind = Literal["mamba", "attention", "mlp", "moe"]
_KINDS: dict[str, Kind] = {
    "mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention",
    "mlp": "mlp", "moe": "moe",
}  # fmt: skip
_LETTERS: dict[str, Kind] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_DEFAULT: tuple[Kind, ...] = ("mamba", "moe", "attention", "mlp")
_ONLY = {
    "attention_bias": False, "use_bias": False, "mamba_proj_bias": False, "sliding_window": None,
    "mamba_hidden_act": "silu", "moe_latent_size": None, "n_shared_experts": 1,
}  # fmt: skip
_MOST_BLOCKS = 1 << 12


def nemotron(fields: Fields) -> dict[str, Any]:
    """Return the fields of a ModelConfig: the kinds of the layers, Mamba2, and experts without a gate.

    Step sizes are at least `time_step_min`, as in transformers. llama.cpp has no such limit.

    Raises:
        ModelError: if a setting is not supported.
    """
    for name, only in _ONLY.items():
        if fields[name] != only:
            raise ModelError(f"{name} is {str(fields[name])[:80]!r}; {only!r} is supported for this architecture")
    kinds = _kinds(fields)
    found = layers_of(kinds) | {
        "mtp_whole": True,
        "norm_eps": float_field(fields, "layer_norm_epsilon"),
        "activation": activation(fields["mlp_hidden_act"]),
    }
    if "moe" in kinds:
        found["mixture"] = _mixture(fields)
    if "recurrent" not in found:
        return found
    bool_field(fields, "use_conv_bias")
    return found | {"mamba": _mamba(fields)}


def layers_of(kinds: Sequence[Kind]) -> dict[str, Any]:
    """Return the fields of a ModelConfig that follow from the kinds of all blocks."""
    mixers = [kinds[first] for first, *_ in joined(kinds)]
    found: dict[str, Any] = {"layers": len(mixers), "gated": False, "inv_freq": ()}
    recurrent = tuple(int(kind == "mamba") for kind in mixers)
    return found | ({"recurrent": recurrent} if any(recurrent) else {})


def joined(kinds: Sequence[Kind]) -> Numbers:
    """Return the numbers of the blocks that form each layer, from the kinds of all blocks.

    Raises:
        ModelError: if the first block is neither Mamba2 nor attention.
    """
    begins = [number for number, kind in enumerate(kinds) if kind in ("mamba", "attention")]
    if begins[:1] != [0]:
        raise ModelError("its first block is neither Mamba2 nor attention, which is not supported")
    return [range(first, last) for first, last in pairwise([*begins, len(kinds)])]


def numbers(fields: Fields) -> Numbers:
    """Return the numbers of the blocks that form each layer, from the fields of a config.json."""
    return joined(_kinds(fields))


def dense(fields: Fields) -> Collection[int]:
    """Return the numbers of the blocks without experts."""
    return [number for number, kind in enumerate(_kinds(fields)) if kind != "moe"]


def with_parts(model: Model, fields: Fields) -> Model:
    """Return the model with references to the parts of fused tensors.

    Tensors for multi-token prediction that TPI does not use are declared as ignored. The layer for multi-token
    prediction is left out unless it is attention followed by experts or a feed-forward network.
    """
    adapted = adapt_refs(model, fields)
    mtp = adapted.mtp if _predicted_by_attention(fields) else None
    return replace(adapted, ignored_tensors=(*model.ignored_tensors, "mtp.*"), mtp=mtp)


def _predicted_by_attention(fields: Fields) -> bool:
    """Return True if the layer for multi-token prediction is attention, then experts or a feed-forward network."""
    listed, pattern = fields["mtp_layers_block_type"], fields["mtp_hybrid_override_pattern"]
    names, given = (_KINDS, listed) if listed is not None else (_LETTERS, "*E" if pattern is None else pattern)
    kinds = [names.get(str(kind)) for kind in given] if isinstance(given, list | str) else []
    return kinds in (["attention", "moe"], ["attention", "mlp"])


def _kinds(fields: Fields) -> tuple[Kind, ...]:
    """Return the kind of each block, from `layers_block_type` or else from `hybrid_override_pattern`.

    Raises:
        ModelError: if there are other kinds.
    """
    listed, pattern = fields["layers_block_type"], fields["hybrid_override_pattern"]
    names, given = (_KINDS, listed) if listed is not None else (_LETTERS, pattern)
    if given is None:
        return _DEFAULT
    known = isinstance(given, list if listed is not None else str) and all(str(kind) in names for kind in given)
    if not known or len(given) > _MOST_BLOCKS:
        raise ModelError(f"the kinds of its blocks are {str(given)[:80]!r}; supported are {', '.join(names)}")
    return tuple(names[str(kind)] for kind in given)


def _mixture(fields: Fields) -> Mixture:
    """Return the settings of experts, which DeepSeek-V3's router chooses.

    Raises:
        ModelError: if experts have biases.
    """
    if bool_field(fields, "mlp_bias"):
        raise ModelError("mlp_bias is true: experts with biases are not supported for this architecture")
    shared = size_field(fields, "moe_shared_expert_intermediate_size")
    return sigmoid_mixture(fields, size_field(fields, "n_routed_experts"), shared)


def _mamba(fields: Fields) -> Mamba:
    return Mamba(
        size_field(fields, "mamba_num_heads"),
        size_field(fields, "n_groups"),
        size_field(fields, "ssm_state_size"),
        size_field(fields, "mamba_head_dim"),
        size_field(fields, "conv_kernel"),
        float_field(fields, "layer_norm_epsilon"),
        float_field(fields, "time_step_min"),
    )

"""Settings of the families with short convolutions, from a config.json."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from tpi.config import Mixture
from tpi.errors import ModelError
from tpi.families.base import BlockRefs, Fields, Model, float_field, int_field, size_field
from tpi.families.huggingface import rope as hfrope
from tpi.families.rope import Rope
from tpi.families.settings import bool_field, head_size, layer_range, windows_of
from tpi.sources.heads import HeadOrder

_KINDS = {"conv": 1, "full_attention": 0}
_KINDS_OF_FOUR = ("sliding_attention", "conv", "full_attention", "conv")
_ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1000000.0},
}


def dense(fields: Fields) -> dict[str, Any]:
    """Return the fields of LFM2, whose feed-forward network is narrower than `intermediate_size`.

    Raises:
        ModelError: if a setting is not supported.
    """
    kinds = fields["layer_types"]
    if kinds is None and fields["full_attn_idxs"] is not None:
        full = fields["full_attn_idxs"]
        if not isinstance(full, list):
            raise ModelError(f"full_attn_idxs is {repr(full)[:80]}; a list of layers is expected")
        kinds = ["full_attention" if layer in full else "conv" for layer in layer_range(fields)]
    return _common(fields, kinds) | {"intermediate": _intermediate(fields)}


def experts(fields: Fields) -> dict[str, Any]:
    """Return the fields of LFM2 with experts: a sigmoid for each expert, and a bias for choosing.

    Raises:
        ModelError: if a setting is not supported.
    """
    mixture = Mixture(
        size_field(fields, "num_experts"),
        size_field(fields, "num_experts_per_tok"),
        size_field(fields, "moe_intermediate_size"),
        scores="sigmoid",
        normalised=bool_field(fields, "norm_topk_prob"),
        scale=float_field(fields, "routed_scaling_factor"),
    )
    bool_field(fields, "use_expert_bias")
    return _common(fields, fields["layer_types"]) | {"mixture": mixture}


def lfm3(fields: Fields) -> dict[str, Any]:
    """Return the fields of LFM3: full and sliding attention with rotations of their own, and a gate for each head.

    Raises:
        ModelError: if a setting is not supported.
    """
    every, kinds = layer_range(fields), fields["layer_types"]
    if kinds is None:
        kinds = [_KINDS_OF_FOUR[layer % 4] if layer else "conv" for layer in every]
    if not isinstance(kinds, list) or any(str(kind) not in (*_KINDS, "sliding_attention") for kind in kinds):
        raise ModelError(
            f"layer_types {str(kinds)[:80]} are not supported; layers may be conv, full_attention or sliding_attention"
        )
    if len(kinds) != len(every):
        raise ModelError(f"layer_types has {len(kinds)} entries for {len(every)} layers")
    size, slides = head_size(fields), [kind == "sliding_attention" for kind in kinds]
    full, local = (
        hfrope.of_kind(fields, kind, size, _ROPES) if kind in kinds else Rope(())
        for kind in ("full_attention", "sliding_attention")
    )
    bool_field(fields, "use_sandwich_norm")
    return (
        _convolutions(fields, tuple(int(kind == "conv") for kind in kinds))
        | windows_of(fields, slides)
        | {
            "inv_freq": full.inv_freq,
            "rope_scale": full.scale,
            "local_inv_freq": local.inv_freq,
            "local_rope_scale": local.scale,
            "rope_kinds": tuple(2 if each else 1 for each in slides),
            "output_gate": bool_field(fields, "use_attention_gate"),
        }
    )


def adapt_lfm3_refs(model: Model, fields: Fields) -> Model:
    """Return the model with references that repeat each head's row of the gate for all values of the head."""
    order = HeadOrder(1, (0,) * model.config.head_dim)

    def block(refs: BlockRefs) -> BlockRefs:
        if refs.kind != "attention":
            return refs
        parts = ((name, replace(ref, heads=order) if name == "gate" else ref) for name, ref in refs.parts)
        return replace(refs, parts=tuple(parts))

    return replace(model, layers=tuple(tuple(map(block, layer)) for layer in model.layers))


def dense_layers(fields: Fields) -> Collection[int]:
    """Return the numbers of the layers of LFM2 without experts: the first ones."""
    return range(int_field(fields, "num_dense_layers"))


def _convolutions(fields: Fields, recurrent: tuple[int, ...]) -> dict[str, Any]:
    if bool_field(fields, "conv_bias"):
        raise ModelError("conv_bias is true: biases of short convolutions are not supported")
    settings = {"conv_taps": size_field(fields, "conv_L_cache"), "recurrent": recurrent} if any(recurrent) else {}
    return settings | {"activation": "silu", "norm_eps": float_field(fields, "norm_eps")}


def _common(fields: Fields, kinds: object) -> dict[str, Any]:
    every = layer_range(fields)
    kinds = ["full_attention"] * len(every) if kinds is None else kinds
    if not isinstance(kinds, list) or any(str(kind) not in _KINDS for kind in kinds):
        raise ModelError(f"layer_types {str(kinds)[:80]} are not supported; layers may be conv or full_attention")
    if len(kinds) != len(every):
        raise ModelError(f"layer_types has {len(kinds)} entries for {len(every)} layers")
    recurrent = tuple(_KINDS[str(kind)] for kind in kinds)
    rope = hfrope.flat(fields, head_size(fields), size_field(fields, "max_position_embeddings"))
    return rope.fields() | _convolutions(fields, recurrent)


def _intermediate(fields: Fields) -> int:
    """Return the number of neurons of a feed-forward network.

    It is two thirds of `intermediate_size`, times a factor, rounded up.
    """
    width = size_field(fields, "intermediate_size")
    if not bool_field(fields, "block_auto_adjust_ff_dim"):
        return width
    width = 2 * width // 3
    if fields["block_ffn_dim_multiplier"] is None:
        return width
    multiple = size_field(fields, "block_multiple_of")
    return -(-int(float_field(fields, "block_ffn_dim_multiplier") * width) // multiple) * multiple

"""Settings of Gemma 4 from a config.json.

Layers with full attention have heads of their own (`tpi.config.FullHeads`). If `attention_k_eq_v` is true, their values
are their keys before norm and rotation. All layers divide their values by the root mean square of each head.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tpi.config import FullHeads, Mixture
from tpi.errors import ModelError
from tpi.families.base import BlockRefs, Fields, Model, Ref, activation, float_field, int_field, size_field
from tpi.families.gemma4.defaults import LAYERS
from tpi.families.gemma4.shared import shared_settings, without_keys
from tpi.families.huggingface.rope import of_kind
from tpi.families.rope import Rope
from tpi.families.settings import bool_field, head_size, layer_range, sliding_layers

_PERIOD = 6  # without `layer_types`, every sixth layer has full attention and the others a sliding window
_HEADS = {"head_dim", "num_key_value_heads"}
_ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


def flatten(fields: Fields) -> Fields:
    """Return the fields with `per_layer_config` under another name, as other families refuse it.

    `use_bidirectional_attention: vision` is removed, because it concerns the tokens of images only.

    Raises:
        ModelError: if the rotary embedding of all layers is scaled.
    """
    if fields.get("rope_scaling") is not None:
        raise ModelError("rope_scaling is not supported for this family; write rope_parameters for each kind of layer")
    found = {name: value for name, value in fields.items() if name != "per_layer_config"}
    if found.get("use_bidirectional_attention") == "vision":
        del found["use_bidirectional_attention"]
    return found | {LAYERS: fields.get("per_layer_config")}


def gemma4(fields: Fields) -> dict[str, Any]:
    """Return Gemma 4's fields: sliding windows by a pattern, and full layers with heads and rotation of their own.

    Raises:
        ModelError: if a setting is not supported.
    """
    sliding, window = _sliding(fields), size_field(fields, "sliding_window")
    heads, kinds = _heads(fields, sliding), ["sliding_attention" if slides else "full_attention" for slides in sliding]
    sizes = {"sliding_attention": heads["head_dim"], "full_attention": heads["head_dim"]}
    if heads.get("full_heads"):
        sizes["full_attention"] = heads["full_heads"].head_dim
    ropes = {kind: of_kind(fields, kind, sizes[kind], _ROPES) for kind in {*kinds}}
    full, local = (ropes.get(kind, Rope(())) for kind in ("full_attention", "sliding_attention"))
    return (
        heads
        | _experts(fields)
        | _embeddings(fields)
        | shared_settings(
            int_field(fields, "num_kv_shared_layers", 0),
            bool_field(fields, "use_double_wide_mlp"),
            sliding,
            size_field(fields, "intermediate_size"),
        )
        | {
            "activation": activation(fields["hidden_activation"]),
            "attention_scale": 1.0,
            "logit_softcap": float_field(fields, "final_logit_softcapping", 0),
            "embed_scale": size_field(fields, "hidden_size") ** 0.5,
            "value_norm": True,
            "inv_freq": full.inv_freq,
            "rope_scale": full.scale,
            "local_inv_freq": local.inv_freq,
            "local_rope_scale": local.scale,
            "rope_kinds": tuple(2 if slides else 1 for slides in sliding),
            "windows": tuple(window if slides else 0 for slides in sliding) if any(sliding) else (),
        }
    )


def _embeddings(fields: Fields) -> dict[str, Any]:
    """Return the ModelConfig field for per-layer embeddings; empty if the model has none.

    Raises:
        ModelError: if they are of another vocabulary.
    """
    if not fields.get("hidden_size_per_layer_input"):
        return {}
    values = size_field(fields, "hidden_size_per_layer_input")
    own, vocab = size_field(fields, "vocab_size_per_layer_input"), size_field(fields, "vocab_size")
    if own != vocab:
        raise ModelError(f"vocab_size_per_layer_input is {own}, not {vocab} as vocab_size, which is not supported")
    return {"per_layer": values}


def _experts(fields: Fields) -> dict[str, Any]:
    """Return the ModelConfig fields of experts, if layers have experts in addition to a dense feed-forward block."""
    if not fields.get("enable_moe_block"):
        return {}
    bool_field(fields, "enable_moe_block")
    count, used = size_field(fields, "num_experts"), size_field(fields, "top_k_experts")
    mixture = Mixture(count, used, size_field(fields, "moe_intermediate_size"), normalised=True)
    return {"mixture": mixture, "parallel_experts": True}


def adapt_refs(model: Model, fields: Fields) -> Model:
    """Return the model; if `attention_k_eq_v` is true, the values of full layers refer to the tensors of their keys.

    The references to keys and values are removed from layers that read those of other layers.
    """
    model = without_keys(model, "*.layers.{i}.self_attn.{part}_*")
    if not bool_field(fields, "attention_k_eq_v"):
        return model

    def shared(items: tuple[tuple[str, Ref], ...], suffix: str) -> tuple[tuple[str, Ref], ...]:
        found = dict(items)
        return tuple((name, found[f"k{suffix}"] if name == f"v{suffix}" else ref) for name, ref in items)

    def block(layer: int, refs: BlockRefs) -> BlockRefs:
        if refs.kind != "attention" or model.config.window(layer) or model.config.kv_layer(layer) != layer:
            return refs
        return replace(refs, parts=shared(refs.parts, ""), vectors=shared(refs.vectors, ".bias"))

    return replace(
        model, layers=tuple(tuple(block(layer, refs) for refs in own) for layer, own in enumerate(model.layers))
    )


def _sliding(fields: Fields) -> Sequence[bool]:
    """Return one bool for each layer, True if it has a sliding window.

    It is False for the last layer, as in transformers.
    """
    every = layer_range(fields)
    return [*sliding_layers(fields, [(layer + 1) % _PERIOD != 0 for layer in every])[:-1], False]


def _heads(fields: Fields, sliding: Sequence[bool]) -> dict[str, Any]:
    """Return the ModelConfig fields about KV heads and sizes of heads.

    `sliding` is True for each layer with a sliding window.

    Raises:
        ModelError: if layers of one kind differ.
    """
    base = {"num_key_value_heads": size_field(fields, "num_key_value_heads"), "head_dim": head_size(fields)}
    each = [base | own for own in _overrides(fields, sliding)]
    kinds = {
        slides: [own for own, other in zip(each, sliding, strict=True) if other == slides] for slides in {*sliding}
    }
    if any(own != alike[0] for alike in kinds.values() for own in alike):
        raise ModelError("per_layer_config gives layers of one kind different heads, which is not supported")
    full = FullHeads(*(size_field(kinds[False][0], name) for name in ("num_key_value_heads", "head_dim")))
    if True not in kinds:
        return {"kv_heads": full.kv_heads, "head_dim": full.head_dim}
    kv_heads, head_dim = (size_field(kinds[True][0], name) for name in ("num_key_value_heads", "head_dim"))
    alike = full == FullHeads(kv_heads, head_dim)
    return {"kv_heads": kv_heads, "head_dim": head_dim} | ({} if alike else {"full_heads": full})


def _overrides(fields: Fields, sliding: Sequence[bool]) -> list[dict[str, Any]]:
    """Return, for each layer, the fields that replace the model's.

    `sliding` is True for each layer with a sliding window.

    Raises:
        ModelError: if a layer overrides a field that is not about heads, or `per_layer_config` is not an object of
            objects.
    """
    given = fields[LAYERS]
    if given is None:
        full = {"head_dim": fields["global_head_dim"]}
        if bool_field(fields, "attention_k_eq_v") and fields["num_global_key_value_heads"] is not None:
            full["num_key_value_heads"] = fields["num_global_key_value_heads"]
        return [{} if slides else full for slides in sliding]
    if not isinstance(given, dict) or not all(isinstance(own, dict) for own in given.values()):
        raise ModelError("per_layer_config is not an object of objects in the model's configuration")
    names = {name for own in given.values() for name in own} - _HEADS
    unknown = {str(layer) for layer in given} - {str(layer) for layer in range(len(sliding))}
    if names or unknown:
        raise ModelError(f"per_layer_config has {', '.join(sorted(names | unknown))[:80]}, which is not supported")
    return [dict(given.get(str(layer), {})) for layer in range(len(sliding))]

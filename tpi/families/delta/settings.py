"""Settings of the families with DeltaNet layers, from a config.json, and the order of vectors in their tensors."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tpi.config import Delta, Mixture
from tpi.errors import ModelError
from tpi.families.base import BlockRefs, Fields, Model, Ref, int_field, size_field
from tpi.families.huggingface import rope as hfrope
from tpi.families.settings import bool_field, head_size, layer_range
from tpi.sources.heads import HeadOrder

_KINDS = {"linear_attention": 1, "full_attention": 0}


def dense(fields: Fields) -> dict[str, Any]:
    """Return the fields of Qwen3.5: layers of gated DeltaNet, and full attention whose output has a sigmoid gate.

    Raises:
        ModelError: if a setting is not supported.
    """
    if bool_field(fields, "attention_bias"):
        raise ModelError("attention_bias is true: a bias of the output gate is not supported for this architecture")
    if fields["hidden_act"] not in ("silu", "swish"):
        raise ModelError(f"hidden_act is {str(fields['hidden_act'])[:80]!r}; silu is supported for this architecture")
    recurrent = _recurrent(fields)
    rope = hfrope.flat(fields, head_size(fields), size_field(fields, "max_position_embeddings"), partial=True)
    settings = {"delta": _delta(fields), "recurrent": recurrent} if any(recurrent) else {}
    return rope.fields() | settings | {"output_gate": True, "mtp_whole": True}


def experts(fields: Fields) -> dict[str, Any]:
    """Return the fields of Qwen3.5 with experts: softmax over all experts, and a shared expert with a sigmoid gate.

    Raises:
        ModelError: if a setting is not supported.
    """
    mixture = Mixture(
        size_field(fields, "num_experts"),
        size_field(fields, "num_experts_per_tok"),
        size_field(fields, "moe_intermediate_size"),
        size_field(fields, "shared_expert_intermediate_size"),
        normalised=bool_field(fields, "norm_topk_prob") if "norm_topk_prob" in fields else True,
    )
    width = {} if "intermediate_size" in fields else {"intermediate": mixture.width}
    return dense(fields) | {"mixture": mixture} | width


def _recurrent(fields: Fields) -> tuple[int, ...]:
    """Return 1 for each DeltaNet layer and 0 for each other layer.

    Raises:
        ModelError: if `layer_types` has unsupported kinds, or not one entry for each layer.
    """
    kinds, every = fields["layer_types"], layer_range(fields)
    if kinds is None:
        interval = int_field(fields, "full_attention_interval")
        if interval < 1:
            raise ModelError(f"full_attention_interval is {interval}; it must be at least 1")
        return tuple(int((layer + 1) % interval != 0) for layer in every)
    if not isinstance(kinds, list) or any(str(kind) not in _KINDS for kind in kinds):
        raise ModelError(f"layer_types {str(kinds)[:80]} are not supported; layers may be linear or full attention")
    if len(kinds) != len(every):
        raise ModelError(f"layer_types has {len(kinds)} entries for {len(every)} layers")
    return tuple(_KINDS[str(kind)] for kind in kinds)


def _delta(fields: Fields) -> Delta:
    sizes = (
        "linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )  # fmt: skip
    return Delta(*(size_field(fields, name) for name in sizes))


def adapt_refs(model: Model, fields: Fields) -> Model:
    """Return the model with references to the parts of fused tensors: `q_proj`, `in_proj_qkv` and the convolution.

    The tensors of layers for multi-token prediction need not be used. Such a layer is left out if it has its own
    embedding.
    """
    if bool_field(fields, "mtp_use_dedicated_embeddings"):
        model = replace(model, mtp=None)
    return adapt(model, {}, {})


def adapt_next_refs(model: Model, fields: Fields) -> Model:
    """Return Qwen3-Next's model with references to the parts of its fused tensors.

    One tensor interleaves q, k, v and the gate by key head. Another one interleaves b and a.
    """
    delta = model.config.delta
    if delta is None:
        return adapt(model, {}, {})
    each = delta.heads // delta.key_heads
    ends = {"q": delta.key, "k": delta.key, "v": each * delta.value, "gate": each * delta.value}
    return adapt(model, by_key_head(ends), by_key_head({"b": each, "a": each}))


def by_key_head(sizes: Mapping[str, int]) -> dict[str, HeadOrder]:
    """Return the vectors of each part, by name, in a tensor that stores all parts of one head, then those of the next.

    `sizes` has the number of vectors of each part for one head, in the order of the parts.
    """
    orders, begin, size = {}, 0, sum(sizes.values())
    for name, own in sizes.items():
        orders[name] = HeadOrder(size, tuple(range(begin, begin + own)))
        begin += own
    return orders


def adapt(model: Model, parts: Mapping[str, HeadOrder], vectors: Mapping[str, HeadOrder]) -> Model:
    """Return the model with references to the parts of fused tensors.

    Args:
        model: the model as the templates describe it.
        parts: the order of each matrix of a DeltaNet block, by name, if one tensor interleaves them by key head. If
            it is empty, q, k and v follow each other in the tensor.
        vectors: the order of a and b, by name, if one tensor interleaves them; else empty.
    """
    config, delta = model.config, model.config.delta
    pair = by_key_head({"q": config.head_dim, "gate": config.head_dim})
    rows: dict[str, tuple[int, int]] = {}
    if delta is not None:
        key, value = delta.key_heads * delta.key, delta.heads * delta.value
        rows = {"q": (0, key), "k": (key, 2 * key), "v": (2 * key, 2 * key + value)}

    def vector(name: str, ref: Ref) -> tuple[str, Ref]:
        if name.startswith("conv."):
            return name, replace(ref, rows=rows[name.removeprefix("conv.")])
        return name, replace(ref, heads=vectors.get(name))

    def part(name: str, ref: Ref) -> tuple[str, Ref]:
        return name, replace(ref, heads=parts.get(name), rows=None if parts else rows.get(name))

    def block(refs: BlockRefs) -> BlockRefs:
        if refs.kind == "attention":
            return replace(refs, parts=tuple((name, replace(ref, heads=pair.get(name))) for name, ref in refs.parts))
        if refs.kind != "delta":
            return refs
        return replace(
            refs,
            parts=tuple(part(*one) for one in refs.parts),
            vectors=tuple(vector(*one) for one in refs.vectors),
        )

    return replace(model.with_blocks(block), ignored_tensors=(*model.ignored_tensors, "mtp.*", "model.mtp.*"))

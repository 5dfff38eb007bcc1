"""Settings of the families with Mamba2 layers, from a config.json, and the parts of their fused tensors."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tpi.config import Mamba
from tpi.errors import ModelError
from tpi.families import settings
from tpi.families.base import BlockRefs, Fields, Model, Ref, float_field, int_field, size_field
from tpi.families.mamba.names import CONVOLVED, PARTS
from tpi.families.routed.settings import granite_shared
from tpi.families.settings import bool_field, layer_range

_KINDS = {"mamba": 1, "linear_attention": 1, "attention": 0, "full_attention": 0}
_INFINITY = {"{'__float__': 'Infinity'}": math.inf}  # as transformers writes it


def granite_hybrid(fields: Fields) -> dict[str, Any]:
    """Return the fields of Granite 4.

    Its layers have Mamba2 or attention, and experts or a dense network; the model may lack RoPE.

    Raises:
        ModelError: if a setting is not supported.
    """
    recurrent = _recurrent(fields)
    if fields["position_embedding_type"] not in (None, "rope", "nope"):
        raise ModelError(
            f"position_embedding_type is {str(fields['position_embedding_type'])[:80]!r}; rope is supported"
        )
    found: dict[str, Any] = {} if fields["position_embedding_type"] == "rope" else {"inv_freq": ()}
    if any(recurrent):
        found |= {"mamba": _granite(fields), "recurrent": recurrent}
    if int_field(fields, "num_local_experts") > 0:
        return granite_shared(fields) | found
    return settings.granite(fields) | found | {"intermediate": size_field(fields, "shared_intermediate_size")}


def _recurrent(fields: Fields) -> tuple[int, ...]:
    """Return 1 for each layer of Mamba2 and 0 for each other layer.

    Raises:
        ModelError: if `layer_types` has unsupported kinds, or not one entry for each layer.
    """
    kinds, every = fields["layer_types"], layer_range(fields)
    kinds = ["mamba" for _ in every] if kinds is None else kinds
    if not isinstance(kinds, list) or any(str(kind) not in _KINDS for kind in kinds):
        raise ModelError(f"layer_types {str(kinds)[:80]} are not supported; layers may be mamba or attention")
    if len(kinds) != len(every):
        raise ModelError(f"layer_types has {len(kinds)} entries for {len(every)} layers")
    return tuple(_KINDS[str(kind)] for kind in kinds)


def _granite(fields: Fields) -> Mamba:
    if bool_field(fields, "mamba_proj_bias"):
        raise ModelError("mamba_proj_bias is true: biases of the projections of Mamba2 layers are not supported")
    if fields["hidden_act"] not in ("silu", "swish"):
        raise ModelError(f"hidden_act is {str(fields['hidden_act'])[:80]!r}; Mamba2 layers are supported with silu")
    bool_field(fields, "mamba_conv_bias")
    size_field(fields, "mamba_chunk_size")  # how the original code divides a prompt
    heads, inner = (
        size_field(fields, "mamba_n_heads"),
        size_field(fields, "mamba_expand") * size_field(fields, "hidden_size"),
    )
    value = inner // heads if fields["mamba_d_head"] == "auto" else size_field(fields, "mamba_d_head")
    if heads * value != inner:
        raise ModelError(f"mamba_n_heads {heads} times mamba_d_head {value} is not {inner}, the width of Mamba2 layers")
    least, most = _limits(fields["time_step_limit"])
    return Mamba(
        heads,
        size_field(fields, "mamba_n_groups"),
        size_field(fields, "mamba_d_state"),
        value,
        size_field(fields, "mamba_d_conv"),
        float_field(fields, "rms_norm_eps"),
        least,
        most,
    )


def _limits(given: object) -> tuple[float, float]:
    """Return the limits of step sizes; the second is 0 if there is no upper limit.

    Raises:
        ModelError: if they are not two numbers in order.
    """
    numbers: list[Any] = [_INFINITY.get(str(each), each) for each in given] if isinstance(given, list | tuple) else []
    if len(numbers) != 2 or any(isinstance(each, bool) or not isinstance(each, int | float) for each in numbers):
        raise ModelError(f"time_step_limit is {str(given)[:80]}; two numbers are expected")
    least, most = map(float, numbers)
    if not 0 <= least < most or math.isinf(least):
        raise ModelError(
            f"time_step_limit is {str(given)[:80]}; expected are two numbers from 0 on, the smaller one first"
        )
    return least, 0.0 if math.isinf(most) else most


def adapt_refs(model: Model, fields: Fields | Callable[[str], bool]) -> Model:
    """Return the model with references to the parts of fused tensors: the input's projection and the convolution."""
    mamba = model.config.mamba
    if mamba is None:
        return model
    inner, keys = mamba.heads * mamba.value, mamba.key_heads * mamba.key
    counts = dict(zip(PARTS, (inner, inner, keys, keys, mamba.heads), strict=True))
    rows = _ranges(counts)
    channels = _ranges({part: counts[part] for part in CONVOLVED})

    def reference(name: str, ref: Ref) -> tuple[str, Ref]:
        if name.startswith("conv."):
            return name, replace(ref, rows=channels[name.removeprefix("conv.").removesuffix(".bias")])
        return name, replace(ref, rows=rows.get(name), heads=None)  # none of these is rotated

    def block(refs: BlockRefs) -> BlockRefs:
        if refs.kind != "mamba":
            return refs
        return replace(
            refs,
            parts=tuple(reference(*one) for one in refs.parts),
            vectors=tuple(reference(*one) for one in refs.vectors),
        )

    return replace(model, layers=tuple(tuple(map(block, layer)) for layer in model.layers))


def _ranges(counts: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the range of each of several parts that follow each other, from their lengths `counts`."""
    found, first = {}, 0
    for name, count in counts.items():
        found[name], first = (first, first + count), first + count
    return found

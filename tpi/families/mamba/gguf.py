"""Settings of the families with Mamba2 layers from GGUF metadata."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tpi.config import Mamba
from tpi.errors import ModelError
from tpi.families.base import Fields, Model, Numbers, float_field, size_field
from tpi.families.gguf import experts
from tpi.families.gguf.prediction import main_layers
from tpi.families.mamba.nemotron import Kind, joined, layers_of
from tpi.families.mamba.settings import adapt_refs


def granite_hybrid(fields: Fields) -> dict[str, Any]:
    """Return the fields of Granite 4 with Mamba2 layers. A layer without KV heads has Mamba2."""
    return experts.granite(fields) | hybrid(fields)


def hybrid(fields: Fields) -> dict[str, Any]:
    """Return the ModelConfig fields for the KV heads, for the kinds of the layers, and for the Mamba2 layers.

    Raises:
        ModelError: if layers with attention differ in their KV heads, or sizes contradict each other.
    """
    layers, kv_heads = size_field(fields, "block_count"), fields["attention.head_count_kv"]
    kv_heads = kv_heads if isinstance(kv_heads, list) else [kv_heads] * min(layers, 1 << 12)
    widths = {*map(str, kv_heads)} - {"0"}
    if len(kv_heads) != layers or len(widths) != 1:
        raise ModelError(f"attention.head_count_kv is {str(kv_heads)[:80]} for {layers} layers; one number is expected")
    recurrent = tuple(int(count == 0) for count in kv_heads)
    found: dict[str, Any] = {"kv_heads": next(count for count in kv_heads if count != 0)}
    return found | ({"mamba": _mamba(fields), "recurrent": recurrent} if any(recurrent) else {})


def _mamba(fields: Fields) -> Mamba:
    heads, inner = size_field(fields, "ssm.time_step_rank"), size_field(fields, "ssm.inner_size")
    if inner % heads:
        raise ModelError(f"ssm.inner_size {inner} is not a multiple of {heads} heads")
    return Mamba(
        heads,
        size_field(fields, "ssm.group_count"),
        size_field(fields, "ssm.state_size"),
        inner // heads,
        size_field(fields, "ssm.conv_kernel"),
        float_field(fields, "attention.layer_norm_rms_epsilon"),
    )


def nemotron(fields: Fields) -> dict[str, Any]:
    """Return the fields of Nemotron-H and Nemotron 3: squared ReLU without a gate, sigmoid scores of experts.

    Raises:
        ModelError: if sizes differ between blocks of a kind, or contradict each other.
    """
    for key in ("expert_shared_count", "attention.layer_norm_epsilon"):
        fields.get(key)  # mark as read: there is one, whose length the file has; all norms are RMS norms
    kinds = _kinds(fields)
    found = layers_of(kinds) | {
        "mtp_whole": True,
        "activation": "relu2",
        "kv_heads": _width(fields, "attention.head_count_kv"),
        "intermediate": _width(fields, "feed_forward_length"),
    }
    if "recurrent" in found:
        found["mamba"] = _mamba(fields)
    if not fields.get("expert_count"):
        return found
    shared = size_field(fields, "expert_shared_feed_forward_length")
    return found | {"mixture": experts.mixture(fields, normalised=False, shared=shared, gating=experts.SIGMOID)}


def nemotron_numbers(fields: Fields) -> Numbers:
    """Return the numbers of the blocks of each layer."""
    return joined(_kinds(fields))


def nemotron_refs(model: Model, has: Callable[[str], bool]) -> Model:
    """Return the model with references to the parts of fused tensors.

    The tensors of blocks that predict further tokens need not be used.
    """
    blocks = sum(map(len, model.layers))
    last = (f"blk.{blocks + number}.*" for number in range(4))
    return replace(adapt_refs(model, has), ignored_tensors=(*model.ignored_tensors, *last))


def _kinds(fields: Fields) -> list[Kind]:
    """Return the kind of each block; a block without KV heads and without neurons has Mamba2.

    The result leaves out the last blocks, which predict further tokens.
    """
    feed_forward: Kind = "moe" if fields.get("expert_count") else "mlp"
    counts = zip(_counts(fields, "attention.head_count_kv"), _counts(fields, "feed_forward_length"), strict=True)
    return ["attention" if heads else feed_forward if neurons else "mamba" for heads, neurons in counts]


def _counts(fields: Fields, key: str) -> list[int]:
    """Return the numbers that `key` lists, one for each block, without the last blocks, which predict further tokens.

    Raises:
        ModelError: if `key` is not a list of one whole number for each block.
    """
    blocks, given = size_field(fields, "block_count"), fields[key]
    if not isinstance(given, list) or len(given) != blocks or any(type(one) is not int for one in given):
        raise ModelError(f"{key} is {str(given)[:80]}; a whole number for each of {blocks} blocks is expected")
    return given[: main_layers(fields)]


def _width(fields: Fields, key: str) -> int:
    """Return the number above 0 that `key` lists, or 1 if it lists none.

    Raises:
        ModelError: if the list has several different numbers above 0.
    """
    found = {*_counts(fields, key)} - {0}
    if len(found) > 1:
        raise ModelError(f"{key} is {str(fields[key])[:80]}; one number for all blocks of a kind is expected")
    return next(iter(found), 1)

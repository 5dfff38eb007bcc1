"""Settings of Gemma 4 from GGUF metadata, as llama.cpp reads them."""

from collections.abc import Callable
from typing import Any

from tpi.config import FullHeads
from tpi.errors import ModelError
from tpi.families import rope
from tpi.families.base import Fields, Model, float_field, int_field, size_field
from tpi.families.gemma4.shared import shared_settings, without_keys
from tpi.families.gguf.experts import mixture
from tpi.families.gguf.rope import FREQS
from tpi.families.gguf.settings import sliding_pattern, softcap


def gemma4(fields: Fields) -> dict[str, Any]:
    """Return Gemma 4's fields. Metadata about RoPE and sizes of keys is that of full layers unless it ends in `_swa`.

    Raises:
        ModelError: if a setting is not supported.
    """
    sliding, window = sliding_pattern(fields, 6), size_field(fields, "attention.sliding_window")
    sizes = _head_sizes(fields)
    kv_heads = {slides: _alike(fields, "attention.head_count_kv", sliding, slides) for slides in {*sliding}}
    found: dict[str, Any] = {
        "kv_heads": kv_heads.get(True, kv_heads.get(False)),
        "head_dim": sizes[True in kv_heads],
        **_neurons(fields, sliding),
        "per_layer": int_field(fields, "embedding_length_per_layer_input", 0),
        "activation": "gelu_tanh",
        "attention_scale": 1.0,
        "logit_softcap": softcap(fields, "final_logit_softcapping", 0.0),
        "embed_scale": size_field(fields, "embedding_length") ** 0.5,
        "value_norm": True,
        "windows": tuple(window if slides else 0 for slides in sliding) if any(sliding) else (),
        "rope_kinds": tuple(2 if slides else 1 for slides in sliding),
        "local_inv_freq": _local(fields, sizes[True]).inv_freq,
    }
    if fields.get("expert_count"):
        width = size_field(fields, "expert_feed_forward_length")
        found |= {"mixture": mixture(fields, normalised=True, width=width), "parallel_experts": True}
    if len(kv_heads) == 2 and (kv_heads[False], sizes[False]) != (kv_heads[True], sizes[True]):
        found["full_heads"] = FullHeads(kv_heads[False], sizes[False])
    return found


def adapt_refs(model: Model, has: Callable[[str], bool]) -> Model:
    """Return the model without keys and values in the layers that read those of other layers.

    Raises:
        ModelError: if it lacks the rotary factors that say which values full layers rotate, or a tensor of per-layer
            embeddings.
    """
    if 1 in model.config.rope_kinds and not has(FREQS):
        raise ModelError(
            f"{FREQS} is missing, which holds the rotary factors of layers with full attention; convert the model again"
        )
    return without_keys(model, "blk.{i}.attn_{part}*")


def _head_sizes(fields: Fields) -> dict[bool, int]:
    """Return the size of a head in sliding layers (True) and in full layers (False).

    Raises:
        ModelError: if keys and values differ in size.
    """
    share = size_field(fields, "embedding_length") // size_field(fields, "attention.head_count")
    full, value = (size_field(fields, f"attention.{part}_length", max(share, 1)) for part in ("key", "value"))
    sliding = size_field(fields, "attention.key_length_swa", full)
    if full != value or size_field(fields, "attention.value_length_swa", value) != sliding:
        raise ModelError("keys and values of different sizes are not supported")
    return {True: sliding, False: full}


def _local(fields: Fields, head_dim: int) -> rope.Rope:
    """Return the rotary frequencies of sliding layers, which are not scaled.

    Raises:
        ModelError: if llama.cpp would scale the frequencies in a way that is not supported.
    """
    if fields.get("rope.scaling.type") == "yarn" or float_field(fields, "rope.scaling.yarn_ext_factor", -1.0) > 0:
        raise ModelError("rope scaling yarn is not supported for this architecture; convert the model without it")
    turned = int_field(fields, "rope.dimension_count_swa", int_field(fields, "rope.dimension_count", head_dim))
    return rope.plain(rope.frequencies(float_field(fields, "rope.freq_base_swa", 10000.0), turned))


def _alike(fields: Fields, key: str, sliding: list[bool], slides: bool) -> int:
    """Return the value of `key` in the layers of one kind: those with a sliding window if `slides`, else the others.

    The metadata has one number for all layers, or a list of one for each layer. `sliding` is True for each layer with
    a sliding window.

    Raises:
        ModelError: if the value differs between layers of one kind.
    """
    given = fields.get(key)
    if not isinstance(given, list):
        return size_field(fields, key)
    if len(given) != len(sliding):
        raise ModelError(f"{key} has {len(given)} entries for {len(sliding)} layers")
    values = {size for size, other in zip(given, sliding, strict=True) if other == slides}
    if len(values) > 1:
        raise ModelError(f"{key} differs between layers of one kind, which is not supported")
    return size_field({key: values.pop()}, key)


def _neurons(fields: Fields, sliding: list[bool]) -> dict[str, Any]:
    """Return the ModelConfig fields of neurons, and of layers that read the keys and values of others.

    `sliding` is True for each layer with a sliding window.

    Raises:
        ModelError: if the layers differ in their neurons, unless those that read the keys of others have twice as many.
    """
    shared, given = int_field(fields, "attention.shared_kv_layers", 0), fields.get("feed_forward_length")
    own = len(sliding) - shared
    if shared and list(sliding[own - 2 : own]) != [True, False]:
        raise ModelError(
            f"attention.shared_kv_layers is {shared}, but the layers before do not end with a sliding and a full one, "
            "which is not supported"
        )
    each = given if isinstance(given, list) else [given] * len(sliding)
    first, last = (size_field({"feed_forward_length": each[at]}, "feed_forward_length") for at in (0, -1))
    if each != [first] * own + [last] * shared or last not in (first, 2 * first):
        raise ModelError("feed_forward_length differs between layers of one kind, which is not supported")
    return {"intermediate": first} | shared_settings(shared, last != first, sliding, first)

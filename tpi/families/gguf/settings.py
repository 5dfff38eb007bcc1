"""Settings of families without experts: the ModelConfig fields that differ from Llama's, from GGUF metadata."""

from typing import Any

from tpi.errors import ModelError
from tpi.families import rope
from tpi.families.base import Fields, float_field, int_field, size_field

_OPT_POSITIONS, _OPT_OFFSET = 2050, 2  # rows of the position table, and the row of position 0


def every_layer_slides(fields: Fields) -> dict[str, Any]:
    """Return sliding windows for all layers or none, as in Phi-3 and in Mistral, whose architecture is Llama's."""
    window = int_field(fields, "attention.sliding_window", 0)
    return {"windows": (window,) * _layers(fields)} if window else {}


def no_layer_slides(fields: Fields) -> dict[str, Any]:
    """Return no fields: the family has no sliding windows. A window at least as long as the context has no effect.

    Raises:
        ModelError: if the window is shorter than the context, since the file does not say which layers slide.
    """
    window = int_field(fields, "attention.sliding_window", 0)
    if 0 < window < size_field(fields, "context_length"):
        raise ModelError(
            f"attention.sliding_window is {window}, but the file does not say for which layers; convert the model "
            "without it"
        )
    return {}


def every_other_slides(fields: Fields) -> dict[str, Any]:
    """Return sliding windows for the layers of the file's pattern, or else for the first of every two (gpt-oss)."""
    window = int_field(fields, "attention.sliding_window", 0)
    sliding = sliding_pattern(fields, 2)
    return {"windows": tuple(window if slides else 0 for slides in sliding)} if window else {}


def check_local_base(fields: Fields) -> None:
    """Raise a ModelError if sliding layers have another rotary base than the others."""
    base = float_field(fields, "rope.freq_base", 10000.0)
    if float_field(fields, "rope.freq_base_swa", base) != base:
        raise ModelError("rope.freq_base_swa differs from rope.freq_base, which is not supported")


def gemma2(fields: Fields) -> dict[str, Any]:
    """Return Gemma 2's fields: sliding windows by a pattern, caps on scores and logits, a scaled embedding."""
    window = int_field(fields, "attention.sliding_window", 4096)
    check_local_base(fields)
    return _gemma(fields, largest=46) | {
        "attention_softcap": softcap(fields, "attn_logit_softcapping", 50.0),
        "logit_softcap": softcap(fields, "final_logit_softcapping", 30.0),
        "windows": tuple(window if slides else 0 for slides in sliding_pattern(fields, 2)),
    }


def gemma3(fields: Fields) -> dict[str, Any]:
    """Return Gemma 3's fields: sliding windows by a pattern; sliding layers have rotary frequencies of their own.

    These frequencies are not scaled.

    Raises:
        ModelError: if the file uses YaRN with sliding windows.
    """
    found = _gemma(fields, largest=62) | {"logit_softcap": softcap(fields, "final_logit_softcapping", 0.0)}
    window, base = int_field(fields, "attention.sliding_window", 0), float_field(fields, "rope.freq_base_swa", 10000.0)
    sliding = sliding_pattern(fields, 6)
    if not window:
        return found
    if fields.get("rope.scaling.type") == "yarn" or float_field(fields, "rope.scaling.yarn_ext_factor", -1.0) > 0:
        raise ModelError("rope scaling yarn is not supported for this architecture; convert the model without it")
    factors = [float_field(fields, f"rope.scaling.{name}attn_factor", 1.0) for name in ("", "yarn_")]
    size = size_field(fields, "attention.key_length", max(_share(fields), 1))
    local = rope.frequencies(base, int_field(fields, "rope.dimension_count", size))
    return found | {
        "windows": tuple(window if slides else 0 for slides in sliding),
        "rope_kinds": tuple(2 if slides else 1 for slides in sliding),
        "local_inv_freq": rope.plain(local).inv_freq,
        "local_rope_scale": factors[0] * factors[1],
    }


def _gemma(fields: Fields, largest: int) -> dict[str, Any]:
    """Return the fields that all Gemma models share.

    The 27B model, which has `largest` layers, scales queries by (hidden / heads) ** -0.5. GGUF does not record this, so
    the model is recognised by its number of layers.
    """
    found = {"activation": "gelu_tanh", "embed_scale": size_field(fields, "embedding_length") ** 0.5}
    return found | ({"attention_scale": _share(fields) ** -0.5} if _layers(fields) == largest else {})


def smollm3(fields: Fields) -> dict[str, Any]:
    """Return SmolLM3's fields: every fourth layer has no RoPE. GGUF does not record this."""
    return {"rope_kinds": tuple(int((layer + 1) % 4 != 0) for layer in range(_layers(fields)))}


def granite(fields: Fields) -> dict[str, Any]:
    """Return Granite's fields, with its residual multiplier folded into others as in `tpi.families.settings.granite`.

    A scale of 0 for the embedding or the residual connection means 1.

    Raises:
        ModelError: if a scale is out of range, or that of the logits is missing.
    """
    m = float_field(fields, "residual_scale", 1.0) or 1.0
    embedding, logits = float_field(fields, "embedding_scale", 1.0) or 1.0, float_field(fields, "logit_scale")
    if not 1e-6 < m < 1e6 or not 1e-9 < abs(logits) < 1e9:
        raise ModelError(f"a residual_scale of {m} or a logit_scale of {logits} is not supported")
    rotates = {} if fields.get("rope.scaling.finetuned", True) else {"inv_freq": (), "long_inv_freq": ()}
    return {
        "embed_scale": embedding / m,
        "norm_eps": float_field(fields, "attention.layer_norm_rms_epsilon") / m**2,
        "logit_scale": 1 / logits,
        **rotates,
    }


def dense_granite(fields: Fields) -> dict[str, Any]:
    """Return the fields of Granite without experts. In files of Granite 4, the converter describes the feed-forward
    network as shared experts.
    """
    shared, _ = int_field(fields, "expert_shared_feed_forward_length", 0), fields.get("feed_forward_length")
    return granite(fields) | ({"intermediate": shared} if shared else {})


def opt(fields: Fields) -> dict[str, Any]:
    """Return OPT's fields: LayerNorm, learned positions, ReLU without a gate.

    PowerInfer's converter writes the number of rows of the position table, 2050, as the length of the context. The
    first two rows are not those of a position. It leaves out the epsilon of the norms, which is that of all OPT models.

    Raises:
        ModelError: if the file does not say that it has 2050 rows, so that another converter made it.
    """
    if (rows := size_field(fields, "context_length")) != _OPT_POSITIONS:
        raise ModelError(
            f"context_length is {rows}, but PowerInfer's OPT files have {_OPT_POSITIONS}, and no other OPT files are "
            "supported; give the model's Hugging Face directory"
        )
    return {
        "context": rows - _OPT_OFFSET,
        "norm": "layer",
        "norm_eps": 1e-5,
        "gated": False,
        "activation": "relu",
        "inv_freq": (),
        "position_offset": _OPT_OFFSET,
    }


def _share(fields: Fields) -> int:
    return size_field(fields, "embedding_length") // size_field(fields, "attention.head_count")


def sliding_pattern(fields: Fields, default: int, layers: int = 0) -> list[bool]:
    """Return one bool for each layer, True if it has a sliding window.

    The file's pattern is a list with one entry for each layer, or a period: the last layer of each period has full
    attention. `default` is the period if the file has no pattern; with a period of 0, all layers slide. `layers` is the
    number of layers without those for multi-token prediction; 0 if the file has none of those. A list may leave the
    layers for multi-token prediction out.

    Raises:
        ModelError: if the pattern is neither a list nor a period.
    """
    found, every = fields.get("attention.sliding_window_pattern"), _layers(fields)
    layers = layers or every
    if isinstance(found, list) and len(found) in (layers, every) and all(type(slides) is bool for slides in found):
        return found[:layers]
    period = int_field(fields, "attention.sliding_window_pattern", default)
    if period < 0:
        raise ModelError(f"attention.sliding_window_pattern is {period}; a period, or a list of layers, is expected")
    return [not period or layer % period < period - 1 for layer in range(layers)]


def softcap(fields: Fields, key: str, default: float) -> float:
    """Return the cap `key`, a positive number, or 0 for no cap.

    Raises:
        ModelError: if it is negative.
    """
    value = float_field(fields, key, default)
    if value < 0:
        raise ModelError(f"{key} is {value}; it must not be negative")
    return value


def _layers(fields: Fields) -> int:
    return min(size_field(fields, "block_count"), 1 << 12)

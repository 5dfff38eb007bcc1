"""What a family's GGUF metadata sets differently from Llama's: ModelConfig fields."""

from typing import Any

from tpi.errors import ModelError
from tpi.families import rope
from tpi.families.base import Fields, count, number, whole


def every_layer_slides(fields: Fields) -> dict[str, Any]:
    """All layers slide, if any (Phi-3, and Mistral, whose architecture is Llama's)."""
    window = whole(fields, "attention.sliding_window", 0)
    return {"windows": (window,) * _layers(fields)} if window else {}


def no_layer_slides(fields: Fields) -> dict[str, Any]:
    """A window that is no shorter than the context asks for nothing; of another one it is not said which layers slide.

    Raises:
        ModelError: if there is such a window.
    """
    window = whole(fields, "attention.sliding_window", 0)
    if 0 < window < count(fields, "context_length"):
        raise ModelError(
            f"attention.sliding_window is {window}, and the file does not say for which layers; convert it without"
        )
    return {}


def every_other_slides(fields: Fields) -> dict[str, Any]:
    """The first of every two layers slides, or those that a pattern says, if any (gpt-oss)."""
    window = whole(fields, "attention.sliding_window", 0)
    sliding = _pattern(fields, 2)
    return {"windows": tuple(window if slides else 0 for slides in sliding)} if window else {}


def check_local_base(fields: Fields) -> None:
    """Raise a ModelError if sliding layers are to have frequencies of their own."""
    base = number(fields, "rope.freq_base", 10000.0)
    if number(fields, "rope.freq_base_swa", base) != base:
        raise ModelError("rope.freq_base_swa differs from rope.freq_base, which is not supported")


def gemma2(fields: Fields) -> dict[str, Any]:
    """Sliding layers by a pattern; scores and logits are capped; the embedding is scaled."""
    window = whole(fields, "attention.sliding_window", 4096)
    check_local_base(fields)
    return _gemma(fields, largest=46) | {
        "attention_softcap": _cap(fields, "attn_logit_softcapping", 50.0),
        "logit_softcap": _cap(fields, "final_logit_softcapping", 30.0),
        "windows": tuple(window if slides else 0 for slides in _pattern(fields, 2)),
    }


def gemma3(fields: Fields) -> dict[str, Any]:
    """Sliding layers by a pattern, with frequencies of their own, which are not scaled."""
    found = _gemma(fields, largest=62) | {"logit_softcap": _cap(fields, "final_logit_softcapping", 0.0)}
    window, base = whole(fields, "attention.sliding_window", 0), number(fields, "rope.freq_base_swa", 10000.0)
    sliding = _pattern(fields, 6)
    if not window:
        return found
    if fields.get("rope.scaling.type") == "yarn" or number(fields, "rope.scaling.yarn_ext_factor", -1.0) > 0:
        raise ModelError("rope scaling yarn is not supported for this architecture; convert it without")
    factors = [number(fields, f"rope.scaling.{name}attn_factor", 1.0) for name in ("", "yarn_")]
    size = count(fields, "attention.key_length", max(_share(fields), 1))
    local = rope.frequencies(base, whole(fields, "rope.dimension_count", size))
    return found | {
        "windows": tuple(window if slides else 0 for slides in sliding),
        "rope_kinds": tuple(2 if slides else 1 for slides in sliding),
        "local_inv_freq": rope.plain(local).inv_freq,
        "local_rope_scale": factors[0] * factors[1],
    }


def _gemma(fields: Fields, largest: int) -> dict[str, Any]:
    """What all have; of the 27B model, known by its number of layers, GGUF does not record that it scales queries by
    hidden / heads."""
    found = {"activation": "gelu_tanh", "embed_scale": count(fields, "embedding_length") ** 0.5}
    return found | ({"attention_scale": _share(fields) ** -0.5} if _layers(fields) == largest else {})


def smollm3(fields: Fields) -> dict[str, Any]:
    """Every fourth layer has no RoPE, which GGUF does not record."""
    return {"rope_kinds": tuple(int((layer + 1) % 4 != 0) for layer in range(_layers(fields)))}


def granite(fields: Fields) -> dict[str, Any]:
    """Scales of embedding, residual connection and logits, as in `tpi.families.settings.granite`; 0 is none.

    Raises:
        ModelError: if a scale is beyond reason, or there is none for the logits.
    """
    m = number(fields, "residual_scale", 1.0) or 1.0
    embedding, logits = number(fields, "embedding_scale", 1.0) or 1.0, number(fields, "logit_scale")
    if not 1e-6 < m < 1e6 or not 1e-9 < abs(logits) < 1e9:
        raise ModelError(f"a residual_scale of {m} or a logit_scale of {logits} is not supported")
    rotates = {} if fields.get("rope.scaling.finetuned", True) else {"inv_freq": (), "long_inv_freq": ()}
    return {
        "embed_scale": embedding / m,
        "norm_eps": number(fields, "attention.layer_norm_rms_epsilon") / m**2,
        "logit_scale": 1 / logits,
        **rotates,
    }


def _share(fields: Fields) -> int:
    """A head's equal part of the hidden state."""
    return count(fields, "embedding_length") // count(fields, "attention.head_count")


def _pattern(fields: Fields, default: int) -> list[bool]:
    """Which layers slide: as listed, or all but the last of every so many."""
    found, layers = fields.get("attention.sliding_window_pattern"), _layers(fields)
    if isinstance(found, list) and len(found) == layers and all(type(slides) is bool for slides in found):
        return found
    period = whole(fields, "attention.sliding_window_pattern", default)
    if period < 0:
        raise ModelError(f"attention.sliding_window_pattern is {period}; a period, or a list of layers, is expected")
    return [not period or layer % period < period - 1 for layer in range(layers)]


def _cap(fields: Fields, key: str, default: float) -> float:
    """A positive number, or 0 for none."""
    value = number(fields, key, default)
    if value < 0:
        raise ModelError(f"{key} is {value}; a positive number is expected")
    return value


def _layers(fields: Fields) -> int:
    return min(count(fields, "block_count"), 1 << 12)

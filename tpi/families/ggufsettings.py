"""What a family's GGUF metadata sets differently from Llama's: ModelConfig fields."""

from typing import Any

from tpi.errors import ModelError
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


def gemma2(fields: Fields) -> dict[str, Any]:
    """Sliding layers by a pattern; scores and logits are capped; the embedding is scaled."""
    layers, hidden = _layers(fields), count(fields, "embedding_length")
    window = whole(fields, "attention.sliding_window", 4096)
    base = number(fields, "rope.freq_base", 10000.0)
    if number(fields, "rope.freq_base_swa", base) != base:
        raise ModelError("rope.freq_base_swa differs from rope.freq_base, which is not supported")
    found = {
        "activation": "gelu_tanh",
        "attention_softcap": _cap(fields, "attn_logit_softcapping", 50.0),
        "logit_softcap": _cap(fields, "final_logit_softcapping", 30.0),
        "embed_scale": hidden**0.5,
        "windows": tuple(window if slides else 0 for slides in _pattern(fields, layers)),
    }
    if layers == 46:  # the 27B model scales by hidden / heads, which GGUF does not record
        found["attention_scale"] = (hidden // count(fields, "attention.head_count")) ** -0.5
    return found


def _pattern(fields: Fields, layers: int) -> list[bool]:
    """Which layers slide: as listed, or all but the last of every so many, by default of every two."""
    found = fields.get("attention.sliding_window_pattern")
    if isinstance(found, list) and len(found) == layers and all(type(slides) is bool for slides in found):
        return found
    period = whole(fields, "attention.sliding_window_pattern", 2)
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

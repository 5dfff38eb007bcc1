"""Draws of Muse Glimmer, whose text model is inside a model with vision."""

import random
from typing import Any

from tests.support.entries import MUSE_VISION

WRAPPED = ("MuseGlimmerForConditionalGeneration",)
CHOICES: dict[str, tuple[Any, ...]] = {
    "qk_scale_factor": (0.5, 3.0), "output_multiplier": (0.3, 2.0), "post_norm_eps": (1e-6, 0.1, 0.5),
    "layer_rope_theta": (None,),
}  # fmt: skip


def settle(found: dict[str, Any], rng: random.Random) -> None:
    """Set mostly a cap, a window, and a rotary base for each layer."""
    layers = found.get("num_hidden_layers")
    if rng.random() < 0.97:
        found["final_logit_softcapping"] = rng.choice([0.5, 4.0])
        found["sliding_window"] = found.get("sliding_window") or 7
    if rng.random() < 0.6 and isinstance(layers, int):
        base = (found.get("rope_parameters") or {}).get("rope_theta", 10000.0)
        found["layer_rope_theta"] = [rng.choice([0, base]) for _ in range(layers)]


def wrapped(architecture: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the whole model; `found` has the fields of its text model."""
    text = {name: value for name, value in found.items() if name != "architectures"}
    tied = {name: text[name] for name in ("tie_word_embeddings",) if name in text}
    sizes = {"vision_config": MUSE_VISION, "out_hidden_size": 64, "projector_hidden_size": 16}
    return {"architectures": [architecture], "text_config": text | {"model_type": "muse_glimmer_text"}, **sizes, **tied}

"""Settings of the families of this folder: the ModelConfig fields that differ from Llama's."""

from typing import Any

from tpi.errors import ModelError
from tpi.families.afternorm.defaults import OLMO3
from tpi.families.base import Fields, float_field, int_field
from tpi.families.huggingface import rope as hfrope
from tpi.families.settings import layer_range, ropes_of_kinds, sliding_layers, windows_of

OLMO2: dict[str, Any] = {"input_norm": False, "whole_norms": True}  # in config.json and in GGUF metadata
_PERIOD = 4  # without `layer_types`, every fourth layer of OLMo 3 has full attention and the others a window


def olmo2(fields: Fields) -> dict[str, Any]:
    """Return OLMo 2's fields: norms of the output of blocks, and norms over all heads."""
    return dict(OLMO2)


def olmo3(fields: Fields) -> dict[str, Any]:
    """Return OLMo 3's fields: those of OLMo 2, and sliding windows with unscaled RoPE in three of four layers.

    Raises:
        ModelError: if only the outer `rope_theta` gives the base of sliding layers, and it is not the usual one.
    """
    sliding = sliding_layers(fields, [(layer + 1) % _PERIOD != 0 for layer in layer_range(fields)])
    usual, outer = float(OLMO3["rope_theta"]), float_field(fields, "rope_theta")
    nested = hfrope.object_of(hfrope.object_of(fields, "rope_parameters"), "sliding_attention")
    if any(sliding) and outer != usual and "rope_theta" not in nested:
        raise ModelError(
            f"rope_theta is {outer}: whether it applies to sliding layers differs between programs; write "
            "rope_parameters with a rope_theta for each kind of layer"
        )
    ropes = ropes_of_kinds({**fields, "rope_local_base_freq": usual}, sliding)
    return OLMO2 | ropes | windows_of(fields, sliding)


def exaone4(fields: Fields) -> dict[str, Any]:
    """Return EXAONE 4's fields: norms of the output of blocks, and the kinds of its layers."""
    return {"input_norm": False} | exaone_layers(fields)


def exaone_layers(fields: Fields) -> dict[str, Any]:
    """Return the fields about sliding windows and RoPE of EXAONE 4, dense and with experts.

    If the model has sliding windows, only the layers with a window have RoPE.

    Raises:
        ModelError: if the kinds of layers are not supported.
    """
    every = layer_range(fields)
    if fields["sliding_window"] is None:
        return {}
    period = 1 if fields["layer_types"] else int_field(fields, "sliding_window_pattern")
    if period < 1:
        raise ModelError(f"sliding_window_pattern is {period}; it must be at least 1")
    sliding = sliding_layers(fields, [(layer + 1) % period != 0 for layer in every])
    return windows_of(fields, sliding) | {"rope_kinds": tuple(int(slides) for slides in sliding)}

"""Settings of the families of this folder from GGUF metadata, as llama.cpp reads them."""

from typing import Any

from tpi.errors import ModelError
from tpi.families import rope
from tpi.families.afternorm.settings import OLMO2
from tpi.families.base import Fields, float_field, int_field, size_field
from tpi.families.gguf.settings import check_local_base, sliding_pattern

_PERIOD = 4  # without a pattern, every fourth layer has full attention and the others a sliding window
_HYBRID_LAYERS = 64  # llama.cpp uses EXAONE 4's windows only in models with this number of layers


def olmo2(fields: Fields) -> dict[str, Any]:
    """Return the fields of OLMo 2 or, if the file has a sliding window, of OLMo 3.

    In OLMo 3, RoPE is not scaled in layers with a sliding window.

    Raises:
        ModelError: if sliding layers have another rotary base than the others.
    """
    check_local_base(fields)
    window, sliding = int_field(fields, "attention.sliding_window", 0), sliding_pattern(fields, _PERIOD)
    if not window:
        return dict(OLMO2)
    share = size_field(fields, "embedding_length") // size_field(fields, "attention.head_count")
    size = size_field(fields, "attention.key_length", max(share, 1))
    base = float_field(fields, "rope.freq_base", 10000.0)
    local = rope.frequencies(base, int_field(fields, "rope.dimension_count", size))
    return OLMO2 | {
        "windows": tuple(window if slides else 0 for slides in sliding),
        "rope_kinds": tuple(2 if slides else 1 for slides in sliding),
        "local_inv_freq": rope.plain(local).inv_freq,
    }


def exaone4(fields: Fields) -> dict[str, Any]:
    """Return EXAONE 4's fields. In a model of 64 layers, three of four have a sliding window, and only these have RoPE.

    Raises:
        ModelError: if a model with another number of layers has a sliding window, which llama.cpp would ignore.
    """
    check_local_base(fields)
    layers, sliding = size_field(fields, "block_count"), sliding_pattern(fields, _PERIOD)
    if layers == _HYBRID_LAYERS:
        window = size_field(fields, "attention.sliding_window", 4096)
        return {
            "input_norm": False,
            "windows": tuple(window if slides else 0 for slides in sliding),
            "rope_kinds": tuple(int(slides) for slides in sliding),
        }
    if given := int_field(fields, "attention.sliding_window", 0):
        raise ModelError(
            f"attention.sliding_window is {given} in {layers} layers: programs differ in whether it applies; take the "
            "model's safetensors"
        )
    return {"input_norm": False}

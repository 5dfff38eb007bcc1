"""Settings of the families with short convolutions from GGUF metadata."""

from typing import Any

from tpi.errors import ModelError
from tpi.families.base import Fields, int_field, size_field
from tpi.families.gguf.experts import mixture


def dense(fields: Fields) -> dict[str, Any]:
    """Return the fields of LFM2. A layer without KV heads has a convolution; all others have the same sliding window.

    Raises:
        ModelError: if the numbers of KV heads differ between the layers that attend, or are not one for each layer.
    """
    layers, kv_heads = size_field(fields, "block_count"), fields["attention.head_count_kv"]
    kv_heads = kv_heads if isinstance(kv_heads, list) else [kv_heads] * min(layers, 1 << 12)
    widths = {*map(str, kv_heads)} - {"0"}
    if len(kv_heads) != layers or len(widths) != 1:
        raise ModelError(f"attention.head_count_kv is {str(kv_heads)[:80]} for {layers} layers; one number is expected")
    recurrent = tuple(int(count == 0) for count in kv_heads)
    found: dict[str, Any] = {"kv_heads": next(count for count in kv_heads if count != 0)}
    taps = int_field(fields, "shortconv.l_cache")
    if any(recurrent):
        found |= {"conv_taps": taps, "recurrent": recurrent}
    if window := int_field(fields, "attention.sliding_window", 0):
        found["windows"] = tuple(0 if each else window for each in recurrent)
    return found


def experts(fields: Fields) -> dict[str, Any]:
    """Return the fields of LFM2 with experts: a sigmoid for each expert, and a bias for choosing."""
    size_field(fields, "leading_dense_block_count", 1)  # the file's routers tell which layers have experts
    return dense(fields) | {"mixture": mixture(fields, normalised=True)}

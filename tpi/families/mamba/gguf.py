"""Settings of the families with Mamba2 layers from GGUF metadata."""

from typing import Any

from tpi.config import Mamba
from tpi.errors import ModelError
from tpi.families.base import Fields, float_field, size_field
from tpi.families.gguf import experts


def granite_hybrid(fields: Fields) -> dict[str, Any]:
    """Return the fields of Granite 4 with Mamba2 layers. A layer without KV heads has Mamba2."""
    return experts.granite(fields) | hybrid(fields)


def hybrid(fields: Fields) -> dict[str, Any]:
    """Return the KV heads, the kinds of the layers, and the settings of those with Mamba2.

    Raises:
        ModelError: if layers with attention differ in their KV heads, or sizes contradict each other.
    """
    layers, kv_heads = size_field(fields, "block_count"), fields["attention.head_count_kv"]
    kv_heads = kv_heads if isinstance(kv_heads, list) else [kv_heads] * min(layers, 1 << 12)
    widths = {*map(str, kv_heads)} - {"0"}
    if len(kv_heads) != layers or len(widths) != 1:
        raise ModelError(f"attention.head_count_kv is {str(kv_heads)[:80]} for {layers} layers; one number is expected")
    heads, inner = size_field(fields, "ssm.time_step_rank"), size_field(fields, "ssm.inner_size")
    if inner % heads:
        raise ModelError(f"ssm.inner_size {inner} is not a multiple of {heads} heads")
    mamba = Mamba(
        heads,
        size_field(fields, "ssm.group_count"),
        size_field(fields, "ssm.state_size"),
        inner // heads,
        size_field(fields, "ssm.conv_kernel"),
        float_field(fields, "attention.layer_norm_rms_epsilon"),
    )
    recurrent = tuple(int(count == 0) for count in kv_heads)
    found: dict[str, Any] = {"kv_heads": next(count for count in kv_heads if count != 0)}
    return found | ({"mamba": mamba, "recurrent": recurrent} if any(recurrent) else {})

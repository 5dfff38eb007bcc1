"""Settings of families with ReLU: the ModelConfig fields that differ from Llama's, from a config.json."""

from typing import Any

from tpi.errors import ModelError
from tpi.families.base import Fields, activation, float_field, size_field
from tpi.families.huggingface import rope as hfrope
from tpi.families.settings import head_size, mistral

_ROTATES_A_PART = ("default", "linear", "dynamic")  # kinds of scaling that transformers applies to a part of a head


def llama_activation(fields: Fields) -> dict[str, Any]:
    """Return the fields of Llama: its activation may be FATReLU (ProSparse), whose threshold is `hidden_act_param`."""
    if fields["hidden_act"] != "fatrelu":
        return {}
    return {"activation": "fatrelu", "activation_threshold": float_field(fields, "hidden_act_param")}


def prosparse(fields: Fields) -> dict[str, Any]:
    """Return ProSparse's fields: Llama with FATReLU or ReLU.

    Raises:
        ModelError: for another activation, since other kinds of models have the same architecture name.
    """
    if fields["hidden_act"] not in ("fatrelu", "relu"):
        raise ModelError(f"the activation of a SparseLlama is {fields['hidden_act']!r}; supported are fatrelu and relu")
    return llama_activation(fields)


def bamboo(fields: Fields) -> dict[str, Any]:
    """Return Bamboo's fields: Mistral with dReLU, that is, ReLU of both gate and up.

    Raises:
        ModelError: for another activation.
    """
    if fields["hidden_act"] != "relu":
        raise ModelError(f"the activation of a Bamboo is {fields['hidden_act']!r}; relu is supported")
    return mistral(fields) | {"activation": "drelu"}


def nemotron(fields: Fields) -> dict[str, Any]:
    """Return Nemotron's fields: LayerNorm with 1 + w, squared ReLU without a gate, RoPE on a part of each head.

    Raises:
        ModelError: if the kind of rope scaling is not supported for a part of a head.
    """
    if (kind := hfrope.scaling_kind(fields)) not in _ROTATES_A_PART:
        raise ModelError(f"rope scaling {kind!r} is not supported for a part of each head")
    rope = hfrope.flat(fields, head_size(fields), size_field(fields, "max_position_embeddings"), partial=True)
    return rope.fields() | {
        "norm": "layer",
        "norm_eps": float_field(fields, "norm_eps"),
        "gated": False,
        "activation": activation(fields["hidden_act"]),
    }

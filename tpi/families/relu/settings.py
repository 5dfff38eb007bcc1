"""What families with ReLU feed-forward networks set differently from Llama: ModelConfig fields from a config.json."""

from typing import Any

from tpi.errors import ModelError
from tpi.families.base import Fields, activation, count, number
from tpi.families.huggingface import rope as hfrope
from tpi.families.settings import head_size, mistral

_ROTATES_A_PART = ("default", "linear", "dynamic")  # kinds of scaling that transformers applies to part of a head


def llama_activation(fields: Fields) -> dict[str, Any]:
    """Llama's activation may have a threshold (ProSparse): `hidden_act_param` of FATReLU."""
    if fields["hidden_act"] != "fatrelu":
        return {}
    return {"activation": "fatrelu", "activation_threshold": number(fields, "hidden_act_param")}


def prosparse(fields: Fields) -> dict[str, Any]:
    """Llama with FATReLU or ReLU.

    Raises:
        ModelError: for another activation: models of other kinds go by the same architecture.
    """
    if fields["hidden_act"] not in ("fatrelu", "relu"):
        raise ModelError(f"the activation of a SparseLlama is {fields['hidden_act']!r}; supported are fatrelu and relu")
    return llama_activation(fields)


def bamboo(fields: Fields) -> dict[str, Any]:
    """Mistral with ReLU of gate and up (dReLU).

    Raises:
        ModelError: for another activation, which would be of both too.
    """
    if fields["hidden_act"] != "relu":
        raise ModelError(f"the activation of a Bamboo is {fields['hidden_act']!r}; relu is supported")
    return mistral(fields) | {"activation": "drelu"}


def nemotron(fields: Fields) -> dict[str, Any]:
    """LayerNorm with 1 + w, ReLU squared without a gate, and a part of each head rotated."""
    if (kind := hfrope.scaling_kind(fields)) not in _ROTATES_A_PART:
        raise ModelError(f"rope scaling {kind!r} is not supported for a part of each head")
    rope = hfrope.flat(fields, head_size(fields), count(fields, "max_position_embeddings"), partial=True)
    return rope.fields() | {
        "norm": "layer",
        "norm_eps": number(fields, "norm_eps"),
        "gated": False,
        "activation": activation(fields["hidden_act"]),
    }

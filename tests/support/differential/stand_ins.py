"""Bamboo and ProSparse, which have no classes in transformers: its Mistral and Llama with other feed-forward networks.

Their model cards give the activation: ReLU of gate and up, and FATReLU, which is 0 up to a threshold.
"""

import random
from collections.abc import Callable
from typing import Any

STAND_INS = {"BambooForCausalLM": "MistralForCausalLM", "SparseLlamaForCausalLM": "LlamaForCausalLM"}
_FATRELU = "fatrelu"

Act = Callable[[Any], Any]


def settle(architecture: str, found: dict[str, Any], rng: random.Random) -> None:
    """Set mostly an activation that the family has."""
    if architecture == "BambooForCausalLM" and rng.random() < 0.95:
        found["hidden_act"] = "relu"
    if architecture == "SparseLlamaForCausalLM" and rng.random() < 0.95:
        found["hidden_act"] = rng.choice(["relu", _FATRELU, _FATRELU])
        if rng.random() < 0.97:
            found["hidden_act_param"] = rng.choice([0.0, 0.01, 0.3])


def for_transformers(fields: dict[str, Any]) -> dict[str, Any]:
    """Return `fields` with an activation that the stand-in knows."""
    return fields | {"hidden_act": "relu" if fields.get("hidden_act") == _FATRELU else fields.get("hidden_act", "relu")}


def adapt(model: Any, architecture: str, fields: dict[str, Any]) -> None:
    """Give a stand-in the feed-forward networks of `architecture`."""
    for layer in model.model.layers:
        if architecture == "BambooForCausalLM":
            layer.mlp.forward = gated(layer.mlp, layer.mlp.act_fn, both=True)
        elif fields.get("hidden_act", _FATRELU) == _FATRELU:
            layer.mlp.forward = gated(layer.mlp, fatrelu(fields.get("hidden_act_param") or 0.0), both=False)


def fatrelu(threshold: float) -> Act:
    """Return FATReLU: 0 up to `threshold`, the identity above."""
    import torch

    return lambda x: torch.nn.functional.threshold(x, threshold, 0.0)


def gated(mlp: Any, act: Act, both: bool) -> Callable[[Any], Any]:
    """Return the network of ProSparse (with `both`, of Bamboo) that uses the matrices of `mlp`."""

    def run(x: Any) -> Any:
        up = mlp.up_proj(x)
        return mlp.down_proj(act(mlp.gate_proj(x)) * (act(up) if both else up))

    return run

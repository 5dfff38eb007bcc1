"""The model in torch: transformers' Llama with ReLU, and the penalty that makes its activations sparse."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.training.vocabulary import BEGIN_ID, END_ID, VOCAB

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "hidden_act": "relu", "tie_word_embeddings": True, "bos_token_id": BEGIN_ID,
    "eos_token_id": END_ID, "pad_token_id": None,
}  # fmt: skip


def build(seed: int = 0) -> Any:
    """An untrained model: transformers' LlamaForCausalLM in float32."""
    import torch
    import transformers

    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))


def weights(model: Any) -> dict[str, Any]:
    """The model's tensors as numpy's, by the names of its checkpoint."""
    return {name: value.detach().numpy() for name, value in model.named_parameters()}


@dataclass
class Gates:
    """What the gates of a step were: one penalty and one share of active neurons for each layer."""

    penalties: list[Any] = field(default_factory=list)  # scalars of torch
    active: list[Any] = field(default_factory=list)

    def penalty(self) -> Any:
        """The mean of `max(g, 0) / rms(g)` over tokens, neurons and layers; empties the lists.

        L1 on the activations alone could be escaped by smaller gates and larger ups; divided by the gates' own size it
        cannot.
        """
        total = sum(self.penalties) / len(self.penalties)
        self.penalties.clear()
        return total

    def share(self) -> list[float]:
        """The share of active neurons of each layer, since this was asked last."""
        shares = [float(value) for value in self.active]
        self.active.clear()
        return shares


@contextmanager
def watched(model: Any) -> Iterator[Gates]:
    """Collects what the gates of `model` are before ReLU."""
    gates = Gates()

    def see(module: Any, inputs: Any, output: Any) -> None:
        values = inputs[0].float()
        size = values.detach().pow(2).mean().sqrt()
        gates.penalties.append(values.clamp(min=0).mean() / size)
        gates.active.append((values > 0).float().mean().detach())

    handles = [layer.mlp.act_fn.register_forward_hook(see) for layer in model.model.layers]
    try:
        yield gates
    finally:
        for handle in handles:
            handle.remove()


def beyond_rank(model: Any, rank: int) -> Any:
    """The share of the gates' weights, by squares, that the `rank` largest singular values of each do not make.

    What a small predictor can know of a gate's sign is what is within its rank.
    """
    import torch

    total = 0
    for layer in model.model.layers:
        weight = layer.mlp.gate_proj.weight
        with torch.no_grad():
            largest = torch.linalg.eigh(weight.T @ weight).eigenvectors[:, -rank:]
        total = total + 1 - (weight @ largest).pow(2).sum() / weight.pow(2).sum()
    return total / len(model.model.layers)

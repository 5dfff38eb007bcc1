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
    """Build an untrained model: transformers' LlamaForCausalLM in float32."""
    import torch
    import transformers

    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))


def weights(model: Any) -> dict[str, Any]:
    """Return the model's tensors as numpy arrays by checkpoint name."""
    return {name: value.detach().numpy() for name, value in model.named_parameters()}


@dataclass
class Gates:
    """One penalty and one share of active neurons for each layer of a step."""

    penalties: list[Any] = field(default_factory=list)  # scalars of torch
    active: list[Any] = field(default_factory=list)

    def penalty(self) -> Any:
        """Return the mean of `max(g, 0) / rms(g)` over tokens, neurons and layers; empty the lists.

        Training could escape a plain L1 on activations by smaller gates and larger ups. Division by the gates' own size
        prevents that.
        """
        total = sum(self.penalties) / len(self.penalties)
        self.penalties.clear()
        return total

    def share(self) -> list[float]:
        """Return the share of active neurons of each layer since the last call."""
        shares = [float(value) for value in self.active]
        self.active.clear()
        return shares


@contextmanager
def watched(model: Any) -> Iterator[Gates]:
    """Collect the gates of `model` before ReLU."""
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
    """Return the share of the gates' squared weights outside the `rank` largest singular values of each gate matrix.

    A small predictor can know a gate's sign only from the part within its rank.
    """
    import torch

    total = 0
    for layer in model.model.layers:
        weight = layer.mlp.gate_proj.weight
        with torch.no_grad():
            largest = torch.linalg.eigh(weight.T @ weight).eigenvectors[:, -rank:]
        total = total + 1 - (weight @ largest).pow(2).sum() / weight.pow(2).sum()
    return total / len(model.model.layers)

"""The small mixture of experts in torch: transformers' OLMoE, trained with the balancing loss of its config."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.training.state import Progress
from benchmarks.training.train import Recipe, surprise
from benchmarks.training.vocabulary import BEGIN_ID, END_ID, VOCAB

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 192, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "num_experts": 16, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01, "norm_topk_prob": False,
    "tie_word_embeddings": True, "bos_token_id": BEGIN_ID, "eos_token_id": END_ID, "pad_token_id": None,
}  # fmt: skip
RECIPE = Recipe(steps=640, sequences=4, rate=3e-3, narrow_steps=0)


def build(seed: int = 0) -> Any:
    """Build an untrained model: transformers' OlmoeForCausalLM in float32, with its experts in one grouped product."""
    import torch
    import transformers

    torch.manual_seed(seed)
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**SHAPE, experts_implementation="grouped_mm"))


def weights(model: Any) -> dict[str, Any]:
    """Return the model's tensors as numpy arrays by checkpoint name, with each expert's gate, up and down separate."""
    found: dict[str, Any] = {}
    for name, value in model.named_parameters():
        values, (prefix, _, last) = value.detach().numpy(), name.rpartition(".")
        if last == "gate_up_proj":
            for at, expert in enumerate(values):
                gate, up = np.split(expert, 2)
                found |= {f"{prefix}.{at}.gate_proj.weight": gate, f"{prefix}.{at}.up_proj.weight": up}
        elif last == "down_proj":
            found |= {f"{prefix}.{at}.down_proj.weight": expert for at, expert in enumerate(values)}
        else:
            found[name] = values
    return found


@dataclass
class Balanced:
    """Cross-entropy plus the family's own loss for uneven routing, with the weight in its config.

    The family's loss is `experts * sum(share of tokens * mean probability)` over experts, for the tokens of all layers
    together (Switch Transformers, equations 4 to 6, as in transformers' OLMoE). With even routing it is
    `num_experts_per_tok`.
    """

    model: Any
    balance: float = 0.0

    def losses(self, batch: Any, progress: Progress) -> tuple[Any, Any]:
        """Return the cross-entropy and the loss of `[sequences, length + 1]` ids, as two scalars of torch."""
        made = self.model(batch[:, :-1], output_router_logits=True)
        self.balance = float(made.aux_loss.detach())
        loss = surprise(made.logits, batch)
        return loss, loss + self.model.config.router_aux_loss_coef * made.aux_loss

    def after(self, progress: Progress) -> dict[str, float]:
        """Return the imbalance of the routing."""
        return {"balance": self.balance}


@contextmanager
def balanced(model: Any, recipe: Recipe) -> Iterator[Balanced]:
    """Create the objective of a mixture."""
    yield Balanced(model)

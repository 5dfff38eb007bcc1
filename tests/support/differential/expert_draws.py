"""What the fields of families with experts may be in draws, and their tensors as files name them."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

NESTED = ("DbrxForCausalLM",)  # whose fields lie in objects: drawn nowhere, and compared by themselves

SLIDING = ("Qwen2MoeForCausalLM", "GptOssForCausalLM")

PLAIN: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 72,
}  # fmt: skip
CHOICES: dict[str, tuple[Any, ...]] = {
    "num_experts": (3, 5, 6), "num_local_experts": (3, 5, 6), "num_experts_per_tok": (1, 1, 2, 3),
    "moe_intermediate_size": (32, 72), "shared_expert_intermediate_size": (32, 40), "norm_topk_prob": (True, False),
    "decoder_sparse_step": (1, 2), "mlp_only_layers": ([], [0], None), "clip_qkv": (None, 0.5, 2.0),
    "qkv_bias": (True, False), "output_router_logits": (False,), "router_aux_loss_coef": (0.1,),
    "router_jitter_noise": (0.0, 0.3), "swiglu_alpha": (1.0, 1.5), "swiglu_limit": (0.3, 1.0),
}  # fmt: skip


def values(one_of: Callable[..., Callable[[random.Random], Any]]) -> dict[str, Callable[[random.Random], Any]]:
    """The draws of each field."""
    return {name: one_of(*choices) for name, choices in CHOICES.items()}


def settle(architecture: str, found: dict[str, Any], rng: random.Random) -> None:
    """Mostly a window where layers may slide: transformers raises where one slides and there is none."""
    if architecture in SLIDING and found.get("sliding_window", 1) is None and rng.random() < 0.9:
        found["sliding_window"] = 7


def stored(model: Any, directory: Path) -> dict[str, Any]:
    """The tensors as transformers writes them: in memory it stacks experts, in files most families do not."""
    from safetensors.torch import load_file

    model.save_pretrained(directory)
    return dict(load_file(directory / "model.safetensors"))

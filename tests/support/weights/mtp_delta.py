"""Tiny models with DeltaNet layers and a layer for multi-token prediction, and what it computes, in torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.models import SIZES, TinyModel, make_model

F32 = npt.NDArray[np.float32]

LAYERS = 3  # of the model; one more, with full attention, is for prediction
FAMILIES = ("qwen35", "qwen3next", "qwen35moe")
_ENDS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")


def make_delta_mtp(name: str, directory: Path, right: bool = False) -> TinyModel:
    """Write the tiny model `name` with a layer for prediction: the tensors of one more layer, and four others.

    With `right`, no block adds anything to the hidden states: then a token decides alone which one follows, and the
    layer always predicts the model's most likely token. The reference has that layer after its other layers.
    """
    import torch
    from safetensors.torch import load_file, save_file

    model = make_model(name, directory, layers=LAYERS + 1)
    settings = json.loads((directory / "config.json").read_text())
    settings |= {
        "num_hidden_layers": LAYERS,
        "layer_types": settings["layer_types"][:LAYERS],
        "mtp_num_hidden_layers": 1,
    }
    (directory / "config.json").write_text(json.dumps(settings))
    tensors, hidden = load_file(directory / "model.safetensors"), SIZES["hidden_size"]
    torch.manual_seed(7)
    own = {
        f"mtp.{end}.weight": torch.randn(hidden) * 0.1
        for end in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    own["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden) * (2 * hidden) ** -0.5
    if right:
        tensors = {key: torch.zeros_like(value) if key.endswith(_ENDS) else value for key, value in tensors.items()}
        own["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(hidden)
        own["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
        own["mtp.fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    renamed = {key.replace(f"model.layers.{LAYERS}.", "mtp.layers.0."): value for key, value in tensors.items()}
    save_file(renamed | own, directory / "model.safetensors", metadata={"format": "pt"})
    return model


def own_tensors(model: TinyModel) -> dict[str, F32]:
    """Return the tensors of the layer for prediction that no other layer has, by the end of their names."""
    from safetensors.torch import load_file

    weights = load_file(model.directory / "model.safetensors")
    ends = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return {end: weights[f"mtp.{end}.weight"].numpy() for end in ends}


def reference(model: TinyModel, tokens: list[int]) -> tuple[F32, F32, F32]:
    """Return the model's normed hidden states, the layer's normed ones and its logits, each `[tokens - 1, ...]`.

    Written after vLLM's models/qwen3_5_mtp.py; the model and the block are those of transformers.
    """
    import torch
    import transformers

    main = (
        transformers.AutoModelForCausalLM.from_pretrained(model.directory, attn_implementation="eager").float().eval()
    )
    body, own = model.reference.model, {end: torch.tensor(value) for end, value in own_tensors(model).items()}
    eps, count = model.reference.config.rms_norm_eps, len(tokens) - 1

    def norm(x: Any, weight: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight)

    with torch.no_grad():
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        hidden = main.model(torch.tensor([tokens[:-1]])).last_hidden_state
        embedded = body.embed_tokens(torch.tensor([tokens[1:]]))
        both = torch.cat((norm(embedded, own["pre_fc_norm_embedding"]), norm(hidden, own["pre_fc_norm_hidden"])), -1)
        x = both @ own["fc"].T
        found = body.layers[LAYERS](
            x, attention_mask=mask, position_ids=positions, position_embeddings=body.rotary_emb(x, positions)
        )
        out = norm(found[0] if isinstance(found, tuple) else found, own["norm"])
        return hidden[0].numpy(), out[0].numpy(), model.reference.lm_head(out)[0].numpy()

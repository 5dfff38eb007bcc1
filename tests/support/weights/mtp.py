"""Tiny models with a layer for multi-token prediction, and what it computes, in torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.models import SIZES, TinyModel, make_model

F32 = npt.NDArray[np.float32]

LAYERS = 2  # of the model; one more is for prediction
_ENDS = ("o_proj.weight", "down_proj.weight", "down_proj")


def make_mtp(name: str, directory: Path, right: bool = False, layers: int = LAYERS) -> TinyModel:
    """Write the tiny model `name` with a layer for prediction: the tensors of one more layer, and four others.

    With `right`, no block adds anything to the hidden states: then a token decides alone which one follows, and the
    layer always predicts the model's most likely token. The reference has that layer after its other `layers`.
    """
    import torch
    from safetensors.torch import load_file, save_file

    model = make_model(name, directory, layers=layers + 1)
    settings = json.loads((directory / "config.json").read_text())
    settings = {key: value for key, value in settings.items() if key != "num_mtp_layers"}
    settings |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(settings))
    tensors, hidden = load_file(directory / "model.safetensors"), SIZES["hidden_size"]
    torch.manual_seed(7)
    norms = {end: 1 + torch.randn(hidden) * 0.1 for end in ("enorm", "hnorm", "shared_head.norm")}
    projection = torch.randn(hidden, 2 * hidden) * (2 * hidden) ** -0.5
    if right:
        tensors = {key: torch.zeros_like(value) if key.endswith(_ENDS) else value for key, value in tensors.items()}
        norms |= {"enorm": torch.ones(hidden), "shared_head.norm": tensors["model.norm.weight"].clone()}
        projection = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    own = {f"{end}.weight": value for end, value in norms.items()} | {
        "eh_proj.weight": projection,
        "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    save_file(
        tensors | {f"model.layers.{layers}.{end}": value.contiguous() for end, value in own.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    return model


def reference(model: TinyModel, tokens: list[int]) -> tuple[F32, F32, F32]:
    """Return the model's normed hidden states, the layer's normed ones and its logits, each `[tokens - 1, ...]`.

    Written after vLLM's models/glm4_moe_mtp.py; the block is that of transformers.
    """
    import torch
    from safetensors.torch import load_file

    body, head = model.reference.model, model.reference.lm_head
    weights = load_file(model.directory / "model.safetensors")
    ends = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    own = {key: weights[f"model.layers.{LAYERS}.{key}.weight"] for key in ends}
    eps, count = model.reference.config.rms_norm_eps, len(tokens) - 1

    def norm(x: Any, weight: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    with torch.no_grad():
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]

        def layer(number: int, x: Any) -> Any:
            found = body.layers[number](
                x, attention_mask=mask, position_ids=positions, position_embeddings=body.rotary_emb(x, positions)
            )
            return found[0] if isinstance(found, tuple) else found

        x = body.embed_tokens(torch.tensor([tokens[:-1]]))
        for number in range(LAYERS):
            x = layer(number, x)
        hidden = body.norm(x)
        embedded = body.embed_tokens(torch.tensor([tokens[1:]])).clone()
        embedded[:, 0] = 0
        both = torch.cat((norm(embedded, own["enorm"]), norm(hidden, own["hnorm"])), -1)
        out = norm(layer(LAYERS, both @ own["eh_proj"].T), own["shared_head.norm"])
        return hidden[0].numpy(), out[0].numpy(), head(out)[0].numpy()

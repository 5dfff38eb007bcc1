"""Tiny models of EXAONE, ERNIE and Nemotron with a layer for multi-token prediction, and what it computes, in torch.

The layer's blocks are those of a layer of the model, with all weights multiplied by `SCALE`.
"""

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.models import SIZES, TinyModel, make_model

F32 = npt.NDArray[np.float32]

SCALE = 1.25
_ENDS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
_CHOICE = "e_score_correction_bias"


@dataclass(frozen=True)
class Layout:
    """The names in the files of one family.

    Attributes:
        blocks: the number of each layer that is copied, and the beginning of the names of its copy.
        own: the layer's further tensors: projection, norm of the embedding, norm of the hidden states, last norm.
    """

    blocks: dict[int, str]
    own: tuple[str, str, str, str]


LAYOUTS = {
    "exaonemoe": Layout(
        {0: "mtp.layers.0."}, ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    ),
    "ernie45moe": Layout(
        {0: "model.mtp_block.0."},
        ("model.mtp_linear_proj.0", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.norm"),
    ),
    "nemotronhmoe": Layout(
        {3: "mtp.layers.0.", 4: "mtp.layers.1."},
        ("mtp.layers.0.eh_proj", "mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.1.final_layernorm"),
    ),
}


def make_apart(name: str, directory: Path, right: bool = False) -> TinyModel:
    """Write the tiny model `name`, a key of `LAYOUTS`, with a layer for prediction.

    With `right`, no block adds anything to the hidden states: then a token decides alone which one follows, and the
    layer always predicts the model's most likely token.
    """
    import torch
    from safetensors.torch import load_file, save_file

    model, layout, hidden = make_model(name, directory), LAYOUTS[name], SIZES["hidden_size"]
    tensors = load_file(directory / "model.safetensors")
    if right:
        tensors = {key: torch.zeros_like(value) if key.endswith(_ENDS) else value for key, value in tensors.items()}
    copied = {
        begin + key.partition(f"layers.{number}.")[2]: value.clone() if key.endswith(_CHOICE) else value * SCALE
        for key, value in tensors.items()
        for number, begin in layout.blocks.items()
        if f"layers.{number}." in key
    }
    torch.manual_seed(7)
    projection, *norms = layout.own
    own = {f"{each}.weight": 1 + torch.randn(hidden) * 0.1 for each in norms}
    own[f"{projection}.weight"] = torch.randn(hidden, 2 * hidden) * (2 * hidden) ** -0.5
    if right:
        final = next(value for key, value in tensors.items() if key.endswith(("model.norm.weight", "norm_f.weight")))
        own |= {f"{norms[0]}.weight": torch.ones(hidden), f"{norms[2]}.weight": final.clone()}
        own[f"{projection}.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    save_file(copied | own | tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return model


def reference(model: TinyModel, name: str, tokens: list[int]) -> tuple[F32, F32, F32]:
    """Return the model's normed hidden states, the layer's normed ones and its logits, each `[tokens - 1, ...]`.

    Written after vLLM's models/exaone_moe_mtp.py and nemotron_h_mtp.py and FastDeploy's ernie4_5_mtp.py; the blocks are
    those of transformers.
    """
    import torch
    from safetensors.torch import load_file

    body, layout, weights = model.reference.base_model, LAYOUTS[name], load_file(model.directory / "model.safetensors")
    projection, token, hidden, last = (weights[f"{each}.weight"] for each in layout.own)
    config, count = model.reference.config, len(tokens) - 1
    eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
    embedding = model.reference.get_input_embeddings()

    def norm(x: Any, weight: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    with torch.no_grad():
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        states = body(torch.tensor([tokens[:-1]])).last_hidden_state
        embedded = embedding(torch.tensor([tokens[1:]]))
        x = torch.cat((norm(embedded, token), norm(states, hidden)), -1) @ projection.T
        for number in layout.blocks:
            block = deepcopy(body.layers[number])
            for parameter in block.parameters():
                parameter.mul_(SCALE)
            more = {"position_embeddings": body.rotary_emb(x, positions)} if hasattr(body, "rotary_emb") else {}
            found = block(x, attention_mask=mask, position_ids=positions, **more)
            x = found[0] if isinstance(found, tuple) else found
        out = norm(x, last)
        return states[0].numpy(), out[0].numpy(), model.reference.get_output_embeddings()(out)[0].numpy()

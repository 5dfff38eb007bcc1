"""Measurements of the trained mixture: perplexity, the experts of each token, and predictions by the router before.

Transformers computes all measurements in float32 from the 8-bit checkpoint.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.training.measure import LENGTH, MOST
from tests.support.weights.trained import MIXTURE, write_trained
from tpi.pack.routing import U16
from tpi.sparsity.replay import I32, cut_sequences

_AT_ONCE = 8  # sequences


@dataclass(frozen=True)
class LayerRouting:
    """How a layer's experts are used over a text.

    Attributes:
        most: share of the tokens that choose the expert that is chosen most.
        least: share of the tokens that choose the expert that is chosen least.
        again: share of a token's experts that the token before chose, too.
        foretold: share of a token's experts that this layer's router chooses for the hidden states before the experts
            of the layer before; None in the first layer.
    """

    most: float
    least: float
    again: float
    foretold: float | None


@dataclass(frozen=True, eq=False)
class Routed:
    """Routing of a text: chosen experts `[tokens, layers, used]`, and predicted ones without the first layer.

    `surprise` is the mean negative log probability of a token, in nats.
    """

    chosen: U16
    foretold: U16
    surprise: float

    def layers(self, experts: int) -> list[LayerRouting]:
        """Return the routing layer by layer."""
        return [self._layer(at, experts) for at in range(self.chosen.shape[1])]

    def _layer(self, at: int, experts: int) -> LayerRouting:
        chosen = self.chosen[:, at]
        shares = np.bincount(chosen.ravel(), minlength=experts) / len(chosen)
        said = shared(self.foretold[:, at - 1], chosen) if at else None
        return LayerRouting(
            round(float(shares.max()), 4), round(float(shares.min()), 4), shared(chosen[:-1], chosen[1:]), said
        )


def shared(some: U16, others: U16) -> float:
    """Return the share of the experts in `others`, `[tokens, used]`, that the same token has in `some`."""
    return round(float((others[:, :, None] == some[:, None, :]).any(axis=2).mean()), 4)


def routed(directory: Path, tokens: I32) -> Routed:
    """Observe the routing of `tokens`, `[sequences, length]`; each sequence is separate."""
    import torch
    import transformers

    model = transformers.OlmoeForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        pieces = np.array_split(tokens.astype(np.int64), -(-len(tokens) // _AT_ONCE))
        seen = [_pass(model, torch.from_numpy(piece)) for piece in pieces]
    chosen, foretold, surprise = (np.concatenate(each) for each in zip(*seen, strict=True))
    return Routed(chosen, foretold, float(surprise.mean(dtype=np.float64)))


def _pass(model: Any, ids: Any) -> tuple[Any, Any, Any]:
    import torch

    states: list[Any] = []  # that come to each layer's experts, not normed yet
    layers = model.model.layers
    hooks = [
        layer.post_attention_layernorm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
        for layer in layers
    ]
    logits = model(ids[:, :-1], use_cache=False).logits
    for hook in hooks:
        hook.remove()
    surprise = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    chosen = [_choose(layer, x) for layer, x in zip(layers, states, strict=True)]
    foretold = [_choose(layer, x) for layer, x in zip(layers[1:], states[:-1], strict=True)]
    return np.stack(chosen, axis=1), np.stack(foretold, axis=1), surprise.numpy()


def _choose(layer: Any, x: Any) -> Any:
    """Choose experts `[tokens, used]` for `x`, `[sequences, length, hidden]`, by the router of `layer`."""
    scores = layer.post_attention_layernorm(x).flatten(0, 1) @ layer.mlp.gate.weight.T
    return scores.topk(layer.mlp.gate.top_k).indices.numpy().astype(np.uint16)


def measure_mixture(ids: list[int], text_ids: list[int]) -> dict[str, Any]:
    """Measure the mixture in the tests' data on two texts.

    `ids` are the tokens that were held out of its training, `text_ids` those of the text in the tests' data.
    """
    with TemporaryDirectory() as folder:
        directory = write_trained(Path(folder, "model"), MIXTURE)
        tokens = cut_sequences(ids, LENGTH, MOST)
        of_all, of_text = routed(directory, tokens), routed(directory, cut_sequences(text_ids, LENGTH))
    experts = json.loads((MIXTURE / "config.json").read_text())["num_experts"]
    return {
        "perplexity": round(float(np.exp(of_all.surprise)), 3),
        "tokens": tokens.size,
        "perplexity_of_text": round(float(np.exp(of_text.surprise)), 3),
        "layers": [asdict(layer) for layer in of_all.layers(experts)],
    }

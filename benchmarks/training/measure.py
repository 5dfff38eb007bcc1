"""Facts about the trained model: its perplexity on unseen text, and the use of its neurons."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.perplexity import perplexity
from tests.support.weights.trained import write_trained
from tpi.kernels import open_kernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.sparsity.replay import FfnWeights, cut_sequences, dense

F32 = npt.NDArray[np.float32]
Active = npt.NDArray[np.bool_]

LENGTH, MOST = 256, 64  # tokens of a sequence, sequences
HOT = 0.8  # of all activations, as in PowerInfer's figure 5


@dataclass(frozen=True)
class LayerUse:
    """How a layer's neurons are used over a text.

    Attributes:
        active: share of the neurons that a token activates.
        hot: share of the neurons that make 80% of all activations.
        similar: share of a token's active neurons that were active for the token before, too.
        always: recall if the most frequently active neurons, the share `active` of all, are always taken.
        dead: share of the neurons that no token activates.
    """

    active: float
    hot: float
    similar: float
    always: float
    dead: float

    @classmethod
    def of(cls, active: Active) -> "LayerUse":
        """Compute one layer's use from its activity, `[tokens, neurons]`."""
        counts = np.sort(active.sum(axis=0))[::-1]
        share, total = float(active.mean()), max(int(counts.sum()), 1)
        again = (active[1:] & active[:-1]).sum() / max(int(active[1:].sum()), 1)
        taken = counts[: max(1, round(share * len(counts)))].sum()
        return cls(
            active=round(share, 4),
            hot=round(float((np.cumsum(counts) < HOT * total).mean()), 4),
            similar=round(float(again), 4),
            always=round(float(taken / total), 4),
            dead=round(float((counts == 0).mean()), 4),
        )


def measure(ids: Sequence[int], text_ids: Sequence[int]) -> dict[str, Any]:
    """Measure the model in the tests' data on two texts.

    `ids` are the tokens that were held out of its training, `text_ids` those of the text in the tests' data.
    """
    kernels, tokens = open_kernels(), cut_sequences(ids, LENGTH, MOST)
    seen: dict[int, list[Active]] = {}

    def watch(layer: int, weights: FfnWeights, x: F32) -> F32:
        seen.setdefault(layer, []).append(weights.active(x))
        return dense(layer, weights, x)

    with TemporaryDirectory() as folder:
        directory = write_trained(Path(folder, "model"))
        pack_model(open_source(directory), "f32", Path(folder, "pack"))
        pack = Pack.open(Path(folder, "pack"))
        of_all = perplexity(pack, tokens, kernels, watch)
        of_text = perplexity(pack, cut_sequences(text_ids, LENGTH), kernels)
    return {
        "perplexity": round(of_all, 3),
        "tokens": tokens.size,
        "perplexity_of_text": round(of_text, 3),
        "layers": [asdict(LayerUse.of(np.concatenate(active))) for active in seen.values()],
    }

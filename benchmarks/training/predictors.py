"""`python -m benchmarks.training.predictors`: train predictors for the trained model, and measure them on unseen text.

The text comes from `benchmarks.training.unseen`. Each format of the pack and each look-ahead has its own predictors.
With `--keep` the predictors, and the text on which they are measured, are stored with the tests' data.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from tokenizers import Tokenizer

from benchmarks.training import unseen
from tests.support.examples import examples_of
from tests.support.weights.trained import PREDICTORS, UNSEEN, write_trained
from tpi.kernels import open_kernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.sparsity.examples import LayerExamples
from tpi.sparsity.files import save_predictors
from tpi.sparsity.predictor import Predictor
from tpi.sparsity.replay import I32, cut_sequences
from tpi.sparsity.training import TrainedPredictor, TrainingRecipe, measure_predictor, train_predictors

LENGTH = 256
LIMIT = 0.06  # of the pack's bytes
RECIPE = TrainingRecipe(rank=64, steps=8000, rate=1e-2, margin=0.01)
Examples = Mapping[int, LayerExamples]


def tokens_of(tokenizer: Tokenizer, texts: Iterable[str], most: int = 1 << 30) -> I32:
    """Encode documents one after the other as `[sequences, LENGTH]`, from at most `most` tokens."""
    ids = [id for text in texts for id in tokenizer.encode(text).ids]
    return cut_sequences(ids[:most], LENGTH)


def trained(
    pack: Pack, parts: Sequence[I32], ahead: int, recipe: TrainingRecipe
) -> tuple[dict[str, Any], list[Predictor]]:
    """Train the predictors of one pack; return their measurements on the third of the parts, and the predictors."""
    kernels, began = open_kernels(), monotonic()
    learned, validation, test = (examples_of(pack, tokens, kernels, ahead) for tokens in parts)
    found = train_predictors(learned, validation, LIMIT * pack.weight_bytes, recipe, _say)
    predictors = [one.predictor for one in found.values()]
    taken = sum(one.nbytes for one in predictors) / pack.weight_bytes
    figures = {"dtype": pack.dtype, "ahead": ahead, "share": round(taken, 4), "seconds": round(monotonic() - began)}
    return figures | {"validation": rows(predictors, validation), "test": rows(predictors, test)}, predictors


def rows(predictors: Iterable[Predictor], examples: Examples) -> list[dict[str, Any]]:
    """Return the recall, and the number of chosen neurons per active neuron, of each layer and of all layers."""
    found, counts = [], []
    for one in predictors:
        of = examples[one.layer]
        counts.append(sum(int(active.sum()) for _, active in of.pieces()))
        recall, chosen = measure_predictor(one, of)
        active = counts[-1] / len(of) / of.neurons
        found.append({"layer": one.layer, "rank": one.rank, "recall": recall, "chosen": chosen, "active": active})
    both = {name: sum(count * one[name] for count, one in zip(counts, found, strict=True)) / sum(counts)
            for name in ("recall", "chosen")}  # fmt: skip
    return [{name: round(value, 4) for name, value in one.items()} for one in (*found, {"layer": -1, **both})]


def _say(one: TrainedPredictor) -> None:
    made = one.predictor
    sys.stderr.write(f"layer {made.layer} rank {made.rank}: recall {one.recall:.4f}, chosen {one.chosen:.3f}\n")


def main(words: Sequence[str]) -> int:
    """Print one JSON object for each format and look-ahead."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.predictors", description=__doc__)
    parser.add_argument("--dtypes", nargs="+", default=["q8"])
    parser.add_argument("--ahead", nargs="+", type=int, default=[0])
    parser.add_argument("--tokens", type=int, default=700_000, help="to learn from, at most")
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    parser.add_argument("--weights", default=RECIPE.weights, choices=["f16", "q8", "q4s"])
    parser.add_argument("--keep", action="store_true", help="keep the first with the tests' data, and their text")
    flags = parser.parse_args(words)
    recipe = replace(RECIPE, steps=flags.steps, weights=flags.weights)
    with TemporaryDirectory() as folder:
        directory = write_trained(Path(folder, "model"))
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        texts = (unseen.learned(), unseen.validation(), [unseen.unseen_text()])
        parts = [tokens_of(tokenizer, text, flags.tokens) for text in texts]
        for dtype, ahead in product(flags.dtypes, flags.ahead):
            if not Path(folder, dtype).exists():
                pack_model(open_source(directory), dtype, Path(folder, dtype))
            figures, predictors = trained(Pack.open(Path(folder, dtype)), parts, ahead, recipe)
            sys.stdout.write(json.dumps(figures) + "\n")
            sys.stdout.flush()
            if flags.keep:
                save_predictors(PREDICTORS, predictors, "trained")
                UNSEEN.write_text(unseen.unseen_text())
                break
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

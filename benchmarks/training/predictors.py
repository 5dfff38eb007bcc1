"""`python -m benchmarks.training.predictors`: predictors for the trained model, from the text that it was trained on,
measured on the text that neither has seen; for every format of the pack, and with a look-ahead of one layer."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from tokenizers import Tokenizer

from benchmarks.training import corpus
from tests.support.weights.trained import TEXT, write_trained
from tpi.kernels import open_kernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.sparsity.examples import examples_of
from tpi.sparsity.replay import I32, chunks
from tpi.sparsity.training import TrainedPredictor, TrainingRecipe, measured, train_predictors

LENGTH = 256
LIMIT = 0.06  # of the pack's bytes


def learned_text(tokenizer: Tokenizer, tokens: int) -> I32:
    """`[sequences, LENGTH]` of the text for training, from documents all over it."""
    ids: list[int] = []
    for document in list(corpus.documents(held=False))[::7]:
        ids += tokenizer.encode(document[:8000]).ids
        if len(ids) >= tokens:
            break
    return chunks(ids[:tokens], LENGTH)


def train(pack: Pack, tokenizer: Tokenizer, tokens: int, ahead: int, recipe: TrainingRecipe) -> dict[str, Any]:
    """Train for one pack, and measure on text held out."""
    kernels, began = open_kernels(), monotonic()
    examples = examples_of(pack, learned_text(tokenizer, tokens), kernels, ahead)
    trained = train_predictors(examples, LIMIT * pack.weight_bytes, recipe, _say)
    seconds = monotonic() - began
    held = examples_of(pack, chunks(tokenizer.encode(TEXT.read_text()).ids, LENGTH), kernels, ahead)
    rows = []
    for layer, one in trained.items():
        recall, chosen = measured(one.predictor, held[layer].x, held[layer].active)
        rows.append({"rank": one.predictor.rank, "recall": round(recall, 4), "chosen": round(chosen, 3),
                     "active": round(float(held[layer].active.mean()), 4)})  # fmt: skip
    taken = sum(one.predictor.nbytes for one in trained.values()) / pack.weight_bytes
    return {"dtype": pack.dtype, "ahead": ahead, "share": round(taken, 4), "seconds": round(seconds), "layers": rows}


def _say(one: TrainedPredictor) -> None:
    made = one.predictor
    sys.stderr.write(f"layer {made.layer} rank {made.rank}: recall {one.recall:.4f}, chosen {one.chosen:.3f}\n")


def main(words: Sequence[str]) -> int:
    """Print one JSON object for each format and look-ahead."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.predictors", description=__doc__)
    parser.add_argument("--dtypes", nargs="+", default=["f32", "bf16", "q8"])
    parser.add_argument("--ahead", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rank", type=int, default=TrainingRecipe.rank)
    flags = parser.parse_args(words)
    recipe = TrainingRecipe(steps=flags.steps, rank=flags.rank)
    with TemporaryDirectory() as folder:
        directory = write_trained(Path(folder, "model"))
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        for dtype in flags.dtypes:
            pack_model(open_source(directory), dtype, Path(folder, dtype))
            for ahead in flags.ahead:
                pack = Pack.open(Path(folder, dtype))
                sys.stdout.write(json.dumps(train(pack, tokenizer, flags.tokens, ahead, recipe)) + "\n")
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

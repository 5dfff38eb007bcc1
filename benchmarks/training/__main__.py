"""Command `python -m benchmarks.training`: train a small model, or resume its training.

With `--keep`, store the model and its measurements with the tests' data. `--model mixture` has experts; the other model
has ReLU.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.training import corpus, measure, mixture, model
from benchmarks.training.routing import measure_mixture
from benchmarks.training.state import Progress, resume
from benchmarks.training.train import Opener, Recipe, optimizer_of, sparse, train
from benchmarks.training.vocabulary import U16, prepared
from tests.support.weights.trained import MIXTURE, TRAINED, keep_trained
from tpi.config import default_cache

TEXT_BYTES = 40_000  # of the held-out text, stored for tests


@dataclass(frozen=True)
class Trainee:
    """A model that can be trained: its recipe, where it is stored, and how it is measured afterwards.

    `measured` takes the held-out token ids and the token ids of the text that is kept.
    """

    build: Callable[[], Any]
    recipe: Recipe
    opened: Opener
    kept: Path
    config: Mapping[str, Any]
    weights: Callable[[Any], dict[str, Any]]
    measured: Callable[[list[int], list[int]], dict[str, Any]]


TRAINEES = {
    "reglu": Trainee(
        model.build, Recipe(), sparse, TRAINED,
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **model.SHAPE}, model.weights, measure.measure,
    ),
    "mixture": Trainee(
        mixture.build, mixture.RECIPE, mixture.balanced, MIXTURE,
        {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", **mixture.SHAPE}, mixture.weights,
        measure_mixture,
    ),
}  # fmt: skip


def keep(trainee: Trainee, folder: Path, state: Path, recipe: Recipe, held: U16) -> None:
    """Store the model of `state` with the tests' data, in 8 bits, with its measurements; `folder` has the text."""
    from tokenizers import Tokenizer

    built = trainee.build()
    progress = resume(state, built, optimizer_of(built, recipe))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "".join(corpus.documents(held=True)).encode()[:TEXT_BYTES].decode(errors="ignore")
    weights = trainee.weights(built)
    keep_trained(trainee.kept, weights, trainee.config, folder / "tokenizer.json", text)
    facts = {"parameters": sum(value.size for value in weights.values()), **_training(progress, recipe)}
    facts |= trainee.measured(held.tolist(), tokenizer.encode(text).ids)
    (trainee.kept / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")


def _training(progress: Progress, recipe: Recipe) -> dict[str, Any]:
    found = {name: [one[name] for one in (progress.history or [])[-10:] if name in one] for name in ("loss", "balance")}
    means = {f"training_{name}": round(sum(each) / len(each), 3) for name, each in found.items() if each}
    return {"steps": progress.step, "tokens_seen": progress.step * recipe.sequences * recipe.length, **means}


def main(words: list[str]) -> int:
    """Train a model; return 1 if training is not complete and must be run again."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--model", choices=sorted(TRAINEES), default="reglu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many, to go on later")
    parser.add_argument("--steps", type=int, help="in place of the recipe's")
    parser.add_argument("--keep", action="store_true", help="keep what is trained so far with the tests' data")
    parser.add_argument("--folder", type=Path, default=default_cache() / "benchmarks" / "training")
    options = parser.parse_args(words)
    import torch

    torch.set_num_threads(options.threads)
    trainee, state = TRAINEES[options.model], options.folder / options.model
    _, tokens, held = prepared(options.folder, corpus.documents(held=False), corpus.documents(held=True))
    recipe = replace(trainee.recipe, steps=options.steps or trainee.recipe.steps)
    if options.keep:
        keep(trainee, options.folder, state, recipe, held)
        return 0
    return 0 if train(trainee.build(), tokens, recipe, state, options.seconds, trainee.opened) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

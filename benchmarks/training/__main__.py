"""`python -m benchmarks.training`: train the small model, or go on where it stopped; with `--keep`, keep it with the
tests' data, and what is measured of it."""

import argparse
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.training import corpus
from benchmarks.training.measure import measure
from benchmarks.training.model import SHAPE, build
from benchmarks.training.state import Progress, resume
from benchmarks.training.train import Recipe, optimizer_of, train
from benchmarks.training.vocabulary import U16, prepared
from tests.support.weights.trained import FACTS, TEXT, keep_trained
from tpi.config import default_cache

TEXT_BYTES = 40_000  # of what was held out, kept for tests


def keep(folder: Path, recipe: Recipe, held: U16) -> None:
    """Put what `folder` holds among the tests' data, in 8 bits, with what is measured of it."""
    from tokenizers import Tokenizer

    model = build()
    progress = resume(folder, model, optimizer_of(model, recipe))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "".join(corpus.documents(held=True)).encode()[:TEXT_BYTES].decode(errors="ignore")
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    keep_trained(weights, {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHAPE},
                 folder / "tokenizer.json", text)  # fmt: skip
    facts = {"parameters": sum(value.size for value in weights.values()), **_training(progress, recipe)}
    facts |= measure(held.tolist(), tokenizer.encode(TEXT.read_text()).ids)
    FACTS.write_text(json.dumps(facts, indent=1) + "\n")


def _training(progress: Progress, recipe: Recipe) -> dict[str, Any]:
    last = (progress.history or [{}])[-10:]
    losses = [one["loss"] for one in last if "loss" in one]
    return {
        "steps": progress.step,
        "tokens_seen": progress.step * recipe.sequences * recipe.length,
        "training_loss": round(sum(losses) / max(len(losses), 1), 3),
    }


def main(words: list[str]) -> int:
    """1 if it has not ended yet: run it again."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many, to go on later")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--keep", action="store_true", help="keep what is trained so far with the tests' data")
    parser.add_argument("--folder", type=Path, default=default_cache() / "benchmarks" / "training")
    options = parser.parse_args(words)
    import torch

    torch.set_num_threads(options.threads)
    _, tokens, held = prepared(options.folder, corpus.documents(held=False), corpus.documents(held=True))
    recipe = replace(Recipe(), steps=options.steps)
    ended = options.keep or train(build(), tokens, recipe, options.folder, options.seconds)
    if options.keep:
        keep(options.folder, recipe, held)
    return 0 if ended else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

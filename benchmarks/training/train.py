"""The training loop: AdamW and a cosine schedule, for any objective.

The default objective is for ReGLU: a penalty whose strength follows the share of active neurons.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.training.model import Gates, beyond_rank, watched
from benchmarks.training.state import Progress, resume, save
from benchmarks.training.vocabulary import U16


@dataclass(frozen=True)
class Recipe:
    """How the model is trained. A step takes `sequences` pieces of `length` tokens."""

    steps: int = 2000
    sequences: int = 16
    length: int = 256
    rate: float = 4e-3
    warm_up: int = 60  # steps
    decay: float = 0.1
    active: float = 0.09  # the share of active neurons that the penalty's strength seeks
    settled: float = 0.6  # share of `steps` after which `active` is sought; before, a falling share from 0.5
    kept_every: int = 50  # steps
    stop: int = 0  # stop after so many steps in all; 0: after all steps
    narrow_steps: int = 450  # steps after the others that make the gates low-rank, so that small predictors suffice
    narrow_rank: int = 24
    narrow_rate: float = 1.5e-3
    narrowness: float = 6.0  # the last strength of that penalty

    @property
    def all_steps(self) -> int:
        """Number of steps of both parts of the training."""
        return self.steps + self.narrow_steps

    def learning_rate(self, step: int) -> float:
        """Return the learning rate: a linear warm-up and a cosine to a twentieth; another cosine in the second part."""
        if step >= self.steps:
            done = (step - self.steps) / max(1, self.narrow_steps)
            return self.narrow_rate * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)
        if step < self.warm_up:
            return self.rate * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.rate * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)

    def narrowing(self, step: int) -> float:
        """Return the strength of the penalty on weights beyond the rank, which rises linearly."""
        return self.narrowness * max(0, step - self.steps + 1) / max(1, self.narrow_steps)

    def sought(self, step: int) -> float:
        """Return the wanted share of active neurons at a step: it falls from a half, linearly in its logarithm."""
        done = min(1.0, step / (self.settled * self.steps))
        return float(math.exp((1 - done) * math.log(0.5) + done * math.log(self.active)))


class Objective(Protocol):
    """The interface of what the steps of a training run minimise."""

    def losses(self, batch: Any, progress: Progress) -> tuple[Any, Any]:
        """Return the surprise and the loss of `[sequences, length + 1]` ids, as two scalars of torch."""

    def after(self, progress: Progress) -> dict[str, float]:
        """Update the objective after a step, and return observations of the step."""


Opener = Callable[[Any, Recipe], AbstractContextManager[Objective]]


def surprise(logits: Any, batch: Any) -> Any:
    """Return the mean of -log p of each sequence's ids except the first, in nats."""
    import torch

    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@dataclass
class Sparse:
    """Cross-entropy, the penalty on gates, and in the second part the penalty on weights beyond their rank."""

    model: Any
    recipe: Recipe
    gates: Gates

    def losses(self, batch: Any, progress: Progress) -> tuple[Any, Any]:
        """Return the surprise and the loss of `[sequences, length + 1]` ids, as two scalars of torch."""
        import torch

        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(batch[:, :-1]).logits
        loss = surprise(logits, batch)
        total = loss + progress.strength * self.gates.penalty()
        if strength := self.recipe.narrowing(progress.step):
            total = total + strength * beyond_rank(self.model, self.recipe.narrow_rank)
        return loss, total

    def after(self, progress: Progress) -> dict[str, float]:
        """Adjust the penalty's strength to the share of active neurons."""
        share = float(np.mean(self.gates.share()))
        error = math.log(max(share, 1e-3) / self.recipe.sought(progress.step))
        progress.strength = min(max(progress.strength * math.exp(0.1 * max(-1.0, min(1.0, error))), 1e-3), 20.0)
        return {"active": share, "strength": progress.strength}


@contextmanager
def sparse(model: Any, recipe: Recipe) -> Iterator[Sparse]:
    """Create the objective of a model with ReLU."""
    with watched(model) as gates:
        yield Sparse(model, recipe, gates)


def train(
    model: Any, tokens: U16, recipe: Recipe, folder: Path, seconds: float = math.inf, opened: Opener = sparse
) -> bool:
    """Train `model` from the state in `folder` to the end of `recipe`, or for `seconds`; return True at the end."""
    optimizer = optimizer_of(model, recipe)
    progress, end = resume(folder, model, optimizer), time.monotonic() + seconds
    model.train()
    with opened(model, recipe) as objective:
        while progress.step < (recipe.stop or recipe.all_steps) and time.monotonic() < end:
            _step(model, optimizer, objective, tokens, recipe, progress)
            if progress.step % recipe.kept_every == 0:
                save(folder, model, optimizer, progress)
    save(folder, model, optimizer, progress)
    return progress.step >= recipe.all_steps


def optimizer_of(model: Any, recipe: Recipe) -> Any:
    """Create AdamW, with weight decay for matrices only."""
    import torch

    groups = [
        {"params": [value for value in model.parameters() if value.dim() > 1], "weight_decay": recipe.decay},
        {"params": [value for value in model.parameters() if value.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.95), fused=True)


def _step(model: Any, optimizer: Any, objective: Objective, tokens: U16, recipe: Recipe, progress: Progress) -> None:
    import torch

    batch = torch.from_numpy(_batch(tokens, recipe, progress.step))
    for group in optimizer.param_groups:
        group["lr"] = recipe.learning_rate(progress.step)
    loss, total = objective.losses(batch, progress)
    total.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    seen = objective.after(progress)
    progress.step += 1
    _note(progress, {"loss": loss.item(), **seen}, recipe)


def _batch(tokens: U16, recipe: Recipe, step: int) -> np.ndarray[Any, Any]:
    """Take `[sequences, length + 1]` token ids from places in the text that depend on the step's number."""
    starts = np.random.default_rng(step).integers(0, len(tokens) - recipe.length - 1, recipe.sequences)
    return np.stack([tokens[at : at + recipe.length + 1] for at in starts]).astype(np.int64)


def _note(progress: Progress, found: dict[str, float], recipe: Recipe) -> None:
    if progress.step % 10 == 0 or progress.step == recipe.all_steps:
        seen = {"step": progress.step, **found}
        progress.history = [*(progress.history or []), seen]
        sys.stderr.write(" ".join(f"{name} {value:.4g}" for name, value in seen.items()) + "\n")

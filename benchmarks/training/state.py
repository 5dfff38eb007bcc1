"""The state of a training run on disk: weights and moments as safetensors, numbers in its metadata."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_ARRAYS, _NUMBERS = "state.safetensors", "state.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Progress:
    """Numbers of a run: steps done, the strength of the penalty, and observations of the steps so far."""

    step: int = 0
    strength: float = 0.05
    history: list[dict[str, float]] | None = None


def save(folder: Path, model: Any, optimizer: Any, progress: Progress) -> None:
    """Save the run in `folder`; replace an earlier save."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"weight.{name}": value.detach().contiguous() for name, value in model.named_parameters()}
    for name, value in model.named_parameters():
        moments = optimizer.state.get(value, {})
        tensors |= {f"{moment}.{name}": moments[moment] for moment in _MOMENTS if moment in moments}
    metadata = {"progress": json.dumps(asdict(progress))}
    save_file(tensors, folder / f"{_ARRAYS}.partial", metadata=metadata)
    (folder / f"{_ARRAYS}.partial").replace(folder / _ARRAYS)
    (folder / _NUMBERS).write_text(json.dumps(asdict(progress)))  # for people; the metadata counts


def resume(folder: Path, model: Any, optimizer: Any) -> Progress:
    """Load the state that `save` wrote into `model` and `optimizer`; without one, start a run from the beginning."""
    import torch
    from safetensors import safe_open

    if not (folder / _ARRAYS).exists():
        return Progress()
    with safe_open(folder / _ARRAYS, "pt") as file:
        progress = Progress(**json.loads(file.metadata()["progress"]))
        for name, value in model.named_parameters():
            value.data.copy_(file.get_tensor(f"weight.{name}"))
            if progress.step:  # before the first step there are no moments
                moments = {moment: file.get_tensor(f"{moment}.{name}") for moment in _MOMENTS}
                optimizer.state[value] = {"step": torch.tensor(float(progress.step)), **moments}
    return progress

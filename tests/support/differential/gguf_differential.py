"""Random GGUF models, packed and run by TPI and computed by the reference: equal logits, or a refusal."""

import os
from collections.abc import Iterable
from pathlib import Path
from shutil import rmtree
from unittest.mock import patch

import numpy as np

from tests.support.differential.differential import Tally
from tests.support.differential.gguf_draws import NAMES, Draw, draw
from tests.support.differential.gguf_expert_reference import reference
from tests.support.models import forward
from tpi.errors import ModelError
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack

TOLERANCE = 1e-4  # of the largest logit, or of 1
TOKENS = [1, 17, 30, 4, 4, 7, 25, 9, 38, 12, 5, 21, 2, 31, 33, 39]


def run(seeds: Iterable[int], directory: Path) -> Tally:
    """Return the tally of a draw with each of `seeds`.

    `Tally.varied` counts metadata keys and tensors, without layer numbers.
    """
    tally = Tally()
    with patch.object(os, "fsync"):  # hundreds of packs that need not survive a power cut
        for seed in seeds:
            compare(seed, draw(np.random.default_rng(seed), NAMES[seed % len(NAMES)]), directory, tally)
    return tally


def compare(seed: int, case: Draw, directory: Path, tally: Tally) -> None:
    """Run one draw, and count the outcome in `tally`."""
    path, target = directory / "m.gguf", directory / "pack"
    case.write(path)
    try:
        pack_model(open_source(path), "f32", target)
    except ModelError as refusal:
        tally.refused[case.name] += 1
        tally.reasons[f"{case.name} {refusal}".replace(str(path), "")] += 1
        return
    logits = forward(Pack.open(target), TOKENS)
    rmtree(target)
    tally.ran[case.name] += 1
    tally.varied.update(list(case.keys))
    tally.varied.update({name.split(".", 2)[2] if name.startswith("blk.") else name for name in case.tensors})
    expected = reference(case.name, case.keys, case.values).logits(TOKENS)
    error = float(np.abs(logits - expected).max()) / max(1.0, float(np.abs(expected).max()))
    if not error < TOLERANCE:
        tally.wrong.append(f"{case.name} {seed}: {error:.2g} with {case.keys}")

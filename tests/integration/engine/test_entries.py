"""Families that differ from others in few settings: any split, any cut of a prompt."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.cluster.inprocess import in_process_engine
from tests.support.entries import ENTRIES
from tests.support.models import VOCAB, TinyModel, reference_logits
from tpi.pack.reader import Pack

TOKENS = [1, *np.random.default_rng(5).integers(3, VOCAB, 36).tolist()]
TOLERANCE = 1e-4


@pytest.mark.parametrize("family", ENTRIES)
@pytest.mark.parametrize(("shares", "chunk"), [([1], 1), ([1], 64), ([3, 1, 2], 7), ([1, 0, 3], 1)])
def test_any_split_and_chunk_equals_transformers(
    family: str,
    shares: list[float],
    chunk: int,
    tiny_model: Callable[[str], TinyModel],
    tiny_pack: Callable[..., Pack],
    tmp_path: Path,
) -> None:
    with in_process_engine(tiny_pack(family), shares, tmp_path, chunk=chunk) as engine:
        logits = engine.logits(TOKENS)
    assert np.abs(logits - reference_logits(tiny_model(family), TOKENS)).max() < TOLERANCE

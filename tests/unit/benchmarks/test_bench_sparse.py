"""The benchmark of sparse products compares products with equal results."""

import numpy as np
import pytest

from benchmarks.sparsity import figures
from tpi.config import Format
from tpi.kernels.native import NativeKernels


@pytest.mark.parametrize(("format", "off"), [("f32", 1e-5), ("q4", 0.15)])
def test_a_block_comes_to_what_its_matrices_do(format: Format, off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "SIZE", 128)
    random = np.random.default_rng(1)
    up, down = (random.standard_normal((64, 128)).astype(np.float32) for _ in range(2))
    x, active = random.standard_normal((1, 128)).astype(np.float32), np.arange(0, 64, 3, dtype=np.int32)
    spec, data = figures._block(format, up, down)
    normed = x / np.sqrt(np.mean(np.square(x)) + 1e-5)
    expected = np.maximum(normed @ up[active].T, 0) @ down[active]
    found = NativeKernels().ffn(spec, data, x, active)
    assert np.linalg.norm(found - expected) <= off * np.linalg.norm(expected)


def test_every_case_is_timed_at_every_sparsity(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(figures, "SIZE", 128)
    rows = figures.operator_rows(1)
    assert [row["sparsity"] for row in rows] == list(figures.SPARSITIES)
    assert all(float(taken) > 0 for row in rows for name, taken in row.items() if name != "sparsity")

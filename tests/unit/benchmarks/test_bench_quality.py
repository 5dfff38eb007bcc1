"""The benchmark of quality: its measures, and a GGUF file that is written again in another format."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks.accuracy.quality import F32, Quality, compared, log_softmax
from benchmarks.support.gguf_copy import requantised
from benchmarks.support.gguf_shape import write_gguf
from tests.support.weights.shapes import LLAMA_1B

SMALL: dict[str, object] = LLAMA_1B | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 300,
}  # fmt: skip


def test_the_measures_are_those_of_the_textbook() -> None:
    """Two tokens, vocabulary of two: p = (1/2, 1/2) and (3/4, 1/4); q = (1/4, 3/4) and (3/4, 1/4)."""
    expected, found = (np.log(np.array(rows, np.float32)) for rows in ([[0.5, 0.5], [0.75, 0.25]],
                                                                         [[0.25, 0.75], [0.75, 0.25]]))  # fmt: skip
    quality = Quality()
    quality.add(expected, found, [0, 1])
    assert quality.kl == pytest.approx([0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75), 0], abs=1e-6)
    assert quality.same == [False, True]
    assert quality.perplexity == pytest.approx(1 / 0.75)


def test_an_engine_is_compared_chunk_by_chunk() -> None:
    chunks = [[1, 2, 3], [4, 0]]

    def engine(scale: float, chunks: Sequence[Sequence[int]]) -> Iterator[F32]:
        for chunk in chunks:
            yield scale * np.random.default_rng(len(chunk)).standard_normal((len(chunk), 5)).astype(np.float32)

    base, found = compared(
        lambda c: engine(1.0, c), {"same": lambda c: engine(1.0, c), "other": lambda c: engine(2.0, c)}, chunks
    )
    assert len(base.kl) == 5
    assert len(base.surprise) == 3
    assert found["same"] == base
    assert np.mean(found["other"].kl) > 0.01
    assert all(found["other"].same)
    np.testing.assert_allclose(np.exp(log_softmax(np.array([[1e4, 0.0]], np.float32))), [[1, 0]])


def test_a_file_in_another_format_says_the_same(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "small.gguf", SMALL)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(requantised(source, tmp_path / "q8.gguf", "Q8_0"))
    names = {name for name in before.fields if not name.startswith("GGUF.")}
    assert names == {name for name in after.fields if not name.startswith("GGUF.")}
    assert all(after.fields[name].contents() == before.fields[name].contents() for name in names)
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert (new.name, new.shape.tolist()) == (old.name, old.shape.tolist())
        assert new.tensor_type.name == ("F32" if len(old.shape) == 1 else "Q8_0")
        values = gguf.quants.dequantize(old.data, old.tensor_type)
        np.testing.assert_allclose(gguf.quants.dequantize(new.data, new.tensor_type), values, atol=0.01)

"""Replays of a model over a text: the model's own logits, its perplexity, and the pieces of the text."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.models import forward
from tests.support.perplexity import logits, perplexity
from tpi.errors import ModelError
from tpi.kernels import open_kernels
from tpi.pack.reader import Pack
from tpi.sparsity.replay import cut_sequences, replay

TEXT = np.random.default_rng(3).integers(3, 320, (3, 24)).astype(np.int32)


@pytest.mark.parametrize("name", ["llama", "gemma2", "opt", "qwen3"])
def test_a_replay_is_the_model(name: str, tiny_pack: Callable[..., Pack]) -> None:
    pack, kernels = tiny_pack(name), open_kernels()
    found = logits(pack, replay(pack, TEXT, kernels), kernels)
    expected = np.concatenate([forward(pack, sequence.tolist()) for sequence in TEXT])
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_perplexity_is_that_of_the_logits(tiny_pack: Callable[..., Pack]) -> None:
    pack = tiny_pack("llama")
    surprise = []
    for sequence in TEXT:
        found = forward(pack, sequence.tolist()).astype(np.float64)[:-1]
        log_sum = np.log(np.exp(found).sum(axis=1))
        surprise += (log_sum - found[np.arange(len(found)), sequence[1:]]).tolist()
    assert perplexity(pack, TEXT, open_kernels()) == pytest.approx(np.exp(np.mean(surprise)), rel=1e-4)


def test_a_text_is_cut_into_whole_pieces() -> None:
    ids = list(range(25))
    np.testing.assert_array_equal(cut_sequences(ids, 10), np.arange(20).reshape(2, 10))
    assert cut_sequences(ids, 10, most=1).shape == (1, 10)
    with pytest.raises(ModelError, match="at least 30"):
        cut_sequences(ids, 30)

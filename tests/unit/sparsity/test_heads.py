"""Attention heads that contribute next to nothing: what could be left out, and that it is next to nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from master.profiling.heads import HeadCut, LeftOut, head_figures, head_line, keep_most
from tests.support.weights.trained import TEXT, TRAINED, write_trained
from tpi.kernels import open_kernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.sparsity.replay import F32, I32, chunks, perplexity, replay


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    directory = tmp_path_factory.mktemp("trained")
    pack_model(open_source(write_trained(directory / "model")), "q8", directory / "q8")
    return Pack.open(directory / "q8")


@pytest.fixture(scope="module")
def tokens() -> I32:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(TRAINED / "tokenizer.json")).encode(TEXT.read_text()).ids
    return chunks(ids, 128)[-4:]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 20), error=st.sampled_from([0.0, 0.02, 0.1, 0.5, 0.999]), faint=st.integers(0, 4))
def test_what_is_left_out_is_within_the_error(seed: int, error: float, faint: int) -> None:
    random = np.random.default_rng(seed)
    parts = random.standard_normal((12, 4, 8)).astype(np.float32)
    parts[:, :faint] *= 1e-3
    kept, found = keep_most(parts, error)
    total, left = parts.sum(axis=1), (parts * kept[:, :, None]).sum(axis=1)
    lost = np.linalg.norm(total - left, axis=1) / np.maximum(np.linalg.norm(total, axis=1), 1e-30)
    assert float(np.sqrt(np.mean(np.square(lost)))) <= error + 1e-5
    assert found.share == pytest.approx(1 - kept.mean())
    if error >= 0.02 and faint < 4:
        assert found.share >= faint / 4 - 0.05


def test_without_an_error_nothing_changes(pack: Pack, tokens: I32) -> None:
    kernels = open_kernels()
    cut = HeadCut(kernels, 0.0)
    whole, found = replay(pack, tokens, kernels), replay(pack, tokens, kernels, heads=cut)
    assert [one.share for one in cut.layers] == [0.0] * pack.config.layers
    np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-4)


def test_a_group_without_weight_is_found(pack: Pack, tokens: I32) -> None:
    kernels = open_kernels()
    silent = HeadCut(kernels, 0.01)

    def silenced(layer: int, spec: object, data: object, mixed: F32) -> F32:
        half = mixed.copy()
        half[:, : half.shape[1] // 2] = 0  # the first of two groups
        return silent(layer, spec, data, half)  # type: ignore[arg-type]

    replay(pack, tokens, kernels, heads=silenced)
    assert min(one.share for one in silent.layers) >= 0.5


def test_the_trained_models_heads_all_contribute(pack: Pack, tokens: I32) -> None:
    """What is left out within the default error is too little to predict; ten times as much shows in the text."""
    kernels = open_kernels()
    found = head_figures(pack, tokens, kernels)
    assert found["skipped"] < 0.02
    assert "so all are computed" in head_line(found)
    whole, cut = perplexity(pack, tokens, kernels), HeadCut(kernels, 0.4)
    assert perplexity(pack, tokens, kernels, heads=cut) > 1.02 * whole
    assert cut.share > 0.05
    assert all(isinstance(one, LeftOut) and one.error <= 0.4 for one in cut.layers)

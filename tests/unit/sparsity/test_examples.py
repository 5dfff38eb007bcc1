"""What predictors learn from: whose input goes with whose activity, and which models have any; profiles of the rest."""

from collections.abc import Callable

import numpy as np
import pytest

from master.profiling.measure import profile_model
from tpi.errors import ModelError
from tpi.kernels import open_kernels
from tpi.pack.reader import Pack
from tpi.progress import silent
from tpi.sparsity.examples import examples_of

TOKENS = np.random.default_rng(3).integers(3, 320, (3, 24)).astype(np.int32)


def test_a_layer_gets_the_input_of_the_one_it_looks_ahead_from(tiny_pack: Callable[..., Pack]) -> None:
    pack, kernels = tiny_pack("opt"), open_kernels()
    own, ahead = examples_of(pack, TOKENS, kernels), examples_of(pack, TOKENS, kernels, 1)
    assert [one.ahead for one in ahead.values()] == [0] + [1] * (pack.config.layers - 1)
    assert own[1].x.shape == (TOKENS.size, pack.config.hidden)
    assert (ahead[1].x == own[0].x).all()
    assert not (own[1].x == own[0].x).all()
    assert (ahead[1].active == own[1].active).all()
    assert 0 < own[1].active.mean() < 1


def test_activations_that_are_never_0_are_for_thresholds(tiny_pack: Callable[..., Pack]) -> None:
    pack, kernels = tiny_pack("llama"), open_kernels()
    with pytest.raises(ModelError, match="silu activations, which are never 0; use thresholds"):
        examples_of(pack, TOKENS, kernels)
    use = profile_model(pack, TOKENS, kernels, silent)  # by thresholds that it measures
    assert use.tokens == TOKENS.size
    assert 0.2 < use.frequency.mean() < 1

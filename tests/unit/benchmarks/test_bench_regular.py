"""A ReGLU model that was not trained: its neurons are used as asked, depend on the input, and can be predicted."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.training.measure import LayerUse
from tests.support.models import forward
from tests.support.weights.regular import NeuronUse, RegularModel, write_regular
from tests.support.weights.shapes import LLAMA_1B
from tpi.kernels import open_kernels
from tpi.pack.reader import Pack
from tpi.sparsity.files import NAME, load_predictors
from tpi.sparsity.replay import I32, FfnWeights, dense, replay

F32 = npt.NDArray[np.float32]
SHAPE: dict[str, Any] = LLAMA_1B | {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 512,
}  # fmt: skip
USE = NeuronUse(rank=32)
COUNTING: I32 = np.arange(60, 60 + 256, dtype=np.int32).reshape(1, -1)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return write_regular(tmp_path_factory.mktemp("regular") / "pack", SHAPE, USE, "f32")


@pytest.fixture(scope="module")
def seen(pack: Pack) -> dict[int, tuple[F32, F32]]:
    """Return by layer the inputs of its gates, and their outputs after ReLU."""
    found: dict[int, tuple[F32, F32]] = {}

    def watch(layer: int, weights: FfnWeights, x: F32) -> F32:
        found[layer] = (x, weights.gated(x))
        return dense(layer, weights, x)

    replay(pack, COUNTING, open_kernels(), watch)
    return found


def test_neurons_are_used_as_asked(seen: dict[int, tuple[F32, F32]]) -> None:
    for _, gates in seen.values():
        found = LayerUse.of(gates != 0)
        assert found.active == pytest.approx(USE.active, rel=0.15)
        assert found.similar == pytest.approx(USE.similar, abs=0.08)
        assert found.hot < 0.6


def test_they_depend_on_the_input(seen: dict[int, tuple[F32, F32]], pack: Pack) -> None:
    assert USE.by_bias_alone(SHAPE["intermediate_size"]) < 0.7
    for layer, (_, gates) in seen.items():
        biases = pack.layers[layer][1].vectors()["gate.bias"]
        active = gates != 0
        named = np.argsort(-biases)[: round(active.mean() * len(biases))]
        assert active[:, named].sum() / active.sum() < 0.7


def test_hotness_is_a_power_law() -> None:
    often = USE.frequencies(4096)
    assert often.mean() == pytest.approx(USE.active, rel=1e-3)
    assert often.max() <= USE.most + 1e-9
    tail = np.flatnonzero(often < USE.most)[1:]
    slope = np.polyfit(np.log(tail + 1), np.log(often[tail]), 1)[0]
    assert slope == pytest.approx(-USE.power, abs=1e-6)


@pytest.mark.parametrize("similar", [0.4, 0.6, 0.8])
def test_similarity_is_chosen(similar: float) -> None:
    use = NeuronUse(similar=similar)
    assert use.repeated(768, use.correlation(768)) == pytest.approx(similar, abs=5e-3)


def test_its_predictors_know_its_neurons(pack: Pack, seen: dict[int, tuple[F32, F32]]) -> None:
    predictors = load_predictors(pack.path / NAME)
    assert list(predictors) == [0, 1, 2]
    for layer, (x, gates) in seen.items():
        scores, active = predictors[layer].scores(x, open_kernels()), gates != 0
        chosen = scores >= np.quantile(scores, 1 - 1.5 * active.mean())
        assert (chosen & active).sum() / active.sum() > 0.95


def test_it_counts(pack: Pack) -> None:
    tokens = COUNTING[0, :40].tolist()
    assert (forward(pack, tokens).argmax(axis=1) == np.asarray(tokens) + 1).mean() > 0.95


def test_the_same_seed_is_the_same_model() -> None:
    name = "model.layers.1.mlp.gate_proj.weight"
    first, second, other = (RegularModel(SHAPE, USE, seed).tensor(name) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)


def test_the_predictors_of_the_billion_are_within_the_limit() -> None:
    use, hidden, inner = NeuronUse(), 2048, 5632
    layer = 5 / 8 * (3 * hidden * inner + 2 * hidden * hidden + 2 * hidden * 256)  # q4: 20 bytes for 32 weights
    assert 2 * use.rank * (hidden + inner) * 34 / 32 + 4 * inner < 0.06 * layer


def test_a_pack_is_made_once(pack: Pack, tmp_path: Path) -> None:
    before = (pack.path / NAME).stat().st_mtime_ns
    write_regular(pack.path, SHAPE, USE, "f32")
    assert (pack.path / NAME).stat().st_mtime_ns == before

"""The trained ReGLU model that is kept with the tests' data: it is what its facts say, in every format."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.models import forward
from tests.support.perplexity import perplexity
from tests.support.weights.packs import part
from tests.support.weights.trained import TEXT, trained_facts, write_trained
from tpi.kernels import open_kernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.sparsity.replay import F32, I32, FfnWeights, cut_sequences, dense, replay

LENGTH = 256


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trained(tmp_path_factory.mktemp("trained") / "model")


@pytest.fixture(scope="module")
def packs(directory: Path) -> dict[str, Pack]:
    for dtype in ("f32", "q8", "q4"):
        pack_model(open_source(directory), dtype, directory.parent / dtype)
    return {dtype: Pack.open(directory.parent / dtype) for dtype in ("f32", "q8", "q4")}


@pytest.fixture(scope="module")
def ids(directory: Path) -> I32:
    from tokenizers import Tokenizer

    return cut_sequences(Tokenizer.from_file(str(directory / "tokenizer.json")).encode(TEXT.read_text()).ids, LENGTH)


def test_it_is_what_transformers_makes_of_it(directory: Path, packs: dict[str, Pack], ids: I32) -> None:
    import torch
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model(torch.from_numpy(ids[:1, :64].astype(np.int64)), use_cache=False).logits[0].numpy()
    found = forward(packs["f32"], ids[0, :64].tolist())
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_its_perplexity_is_that_of_its_facts(packs: dict[str, Pack], ids: I32) -> None:
    facts, kernels = trained_facts(), open_kernels()
    assert perplexity(packs["f32"], ids, kernels) == pytest.approx(facts["perplexity_of_text"], rel=2e-3)
    assert facts["perplexity"] < 10  # of 1024 tokens: it has learned something
    assert perplexity(packs["q8"], ids[:8], kernels) == pytest.approx(
        perplexity(packs["f32"], ids[:8], kernels), rel=5e-3
    )


def test_few_neurons_are_active_and_not_always_the_same(packs: dict[str, Pack], ids: I32) -> None:
    facts, shares, alike = trained_facts(), [], []

    def watch(layer: int, weights: FfnWeights, x: F32) -> F32:
        active = weights.gated(x) != 0
        shares.append(active.mean())
        counts = np.sort(active.sum(axis=0))[::-1]
        alike.append(counts[: round(shares[-1] * len(counts))].sum() / counts.sum())
        return dense(layer, weights, x)

    replay(packs["f32"], ids[:16], open_kernels(), watch)
    for share, layer in zip(shares, facts["layers"], strict=True):
        assert share == pytest.approx(layer["active"], rel=0.2)
    assert np.mean(shares) < 0.12
    assert max(alike) < 0.7  # naming the most frequent ones misses a third


def test_eight_bits_are_the_codes_that_are_kept(packs: dict[str, Pack]) -> None:
    for exact, rounded in zip(packs["f32"].walk(), packs["q8"].walk(), strict=True):
        for run in exact.shape.runs:
            for one in run.parts if run.name != "neuron" else run.parts[:2]:  # columns have other groups
                np.testing.assert_array_equal(part(exact, run.name, one.name), part(rounded, run.name, one.name))

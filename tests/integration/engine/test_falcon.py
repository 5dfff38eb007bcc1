"""Falcon: attention and feed-forward network of a layer side by side, with one sum, against transformers in f32."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from master.generation.engine import Engine
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.cluster.inprocess import in_process_deployment, in_process_engine
from tests.support.generating import generate
from tests.support.models import forward, write_tokenizer
from tests.support.orders import phase_by_phase, use_order
from tests.support.perplexity import logits
from tests.support.weights.packs import part
from tpi.errors import ModelError
from tpi.families.huggingface.reader import from_huggingface
from tpi.kernels import open_kernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.sparsity.replay import replay

TOKENS = [1, *np.random.default_rng(5).integers(3, 320, 40).tolist()]
SIZES: dict[str, Any] = {
    "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "ffn_hidden_size": 160, "vocab_size": 320,
    "max_position_embeddings": 256, "activation": "relu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "40b": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "11b": {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1},
    "7b": {"multi_query": True},
    "heads": {"multi_query": False},
    "plain": {"multi_query": True, "parallel_attn": False, "bias": True},
}

Made = Callable[[str], tuple[Path, Any]]
F32 = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return the directory of a random model of a variant, and the logits of transformers for `TOKENS`."""
    import torch
    import transformers

    known: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in known:
            directory = tmp_path_factory.mktemp(name)
            torch.manual_seed(4)
            config = transformers.FalconConfig(**SIZES, **VARIANTS[name])
            model = transformers.FalconForCausalLM._from_config(config, attn_implementation="eager").eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
                    parameter.add_(torch.randn_like(parameter) * spread)
                found = model(torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
            model.save_pretrained(directory)
            write_tokenizer(directory)
            for dtype in ("f32", "q8"):
                pack_model(open_source(directory), dtype, directory / dtype)
            known[name] = directory, found
        return known[name]

    return get


def error_of(found: F32, expected: F32) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("shares", [[1], [1, 2], [1, 1, 1]])
def test_logits_are_those_of_transformers(name: str, shares: list[float], made: Made, tmp_path: Path) -> None:
    directory, expected = made(name)
    with in_process_engine(Pack.open(directory / "f32"), shares, tmp_path) as engine:
        loop = engine.deployment.node.loop
        found = engine.logits(TOKENS)
        steps, sums, blocks = loop.clock.steps, loop.group.stats.exchanges, len(loop.blocks)
    assert error_of(found, expected) < 1e-4
    each = blocks if name == "plain" else blocks // 2  # one sum for both blocks of a layer
    assert sums == steps * each or len(shares) == 1


@pytest.mark.parametrize("name", ["40b", "7b"])
def test_in_any_order_and_alone(name: str, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_order(monkeypatch, phase_by_phase)
    directory, expected = made(name)
    pack, kernels = Pack.open(directory / "f32"), open_kernels()
    with closing(in_process_deployment(pack, [1, 1], tmp_path)) as deployment:
        assert error_of(Engine(deployment).logits(TOKENS), expected) < 1e-4
    assert error_of(forward(pack, TOKENS), expected) < 1e-4
    tokens = np.asarray([TOKENS], np.int32)
    assert error_of(logits(pack, replay(pack, tokens, kernels), kernels), expected) < 1e-4


def test_generation_is_what_a_prompt_of_it_gives(made: Made, tmp_path: Path) -> None:
    """Computing token by token gives the result of computing all tokens at once."""
    pack = Pack.open(made("40b")[0] / "f32")
    with in_process_engine(pack, [1], tmp_path) as engine:
        sequence = engine.admit(TOKENS[:10])
        for _ in generate(engine, sequence, Sampler(Sampling(temperature=0)), 12):
            pass
        tokens = list(sequence.tokens)
    found = forward(pack, tokens[:-1]).argmax(axis=1)
    np.testing.assert_array_equal(found[9:], tokens[10:])


@pytest.mark.parametrize("name", ["40b", "heads"])
def test_a_fused_tensor_is_cut_by_heads(name: str, made: Made) -> None:
    from safetensors.numpy import load_file

    directory, _ = made(name)
    pack = Pack.open(directory / "f32")
    config, tensors = pack.config, load_file(directory / "model.safetensors")
    fused = tensors["transformer.h.1.self_attention.query_key_value.weight"]
    by_head = fused.reshape(config.kv_heads, config.heads // config.kv_heads + 2, config.head_dim, -1)
    attention = pack.layers[1][0]
    for run, name_, wanted in (
        ("query", "q", by_head[:, :-2]),
        ("kv", "k", by_head[:, -2]),
        ("kv", "v", by_head[:, -1]),
    ):
        np.testing.assert_array_equal(part(attention, run, name_), wanted.reshape(-1, config.hidden))


def test_eight_bits_are_near(made: Made, tmp_path: Path) -> None:
    directory, expected = made("40b")
    pack = Pack.open(directory / "q8")
    with in_process_engine(pack, [1, 1], tmp_path) as engine:
        assert error_of(engine.logits(TOKENS), expected) < 0.05
    assert pack.layers[0][1].run("neuron").layout == "record"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"alibi": True}, "alibi"),
        ({"bias": True}, "bias is true with parallel_attn"),
        ({"new_decoder_architecture": True, "parallel_attn": False}, "new_decoder_architecture without"),
        ({"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ({"n_embed": 128}, "n_embed"),
        ({"multi_query": False, "num_kv_heads": 2}, "num_kv_heads is 2"),
        ({"activation": "tanh"}, "tanh"),
        ({"hidden_size": 100}, "not a multiple of 6 heads"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        from_huggingface({"architectures": ["FalconForCausalLM"], **SIZES, **fields}, lambda name: True, "somewhere")


def test_the_published_configuration_of_40b() -> None:
    fields = json.loads(
        '{"architectures": ["FalconForCausalLM"], "alibi": false, "bias": false, "hidden_size": 8192, '
        '"layer_norm_epsilon": 1e-05, "multi_query": true, "new_decoder_architecture": true, '
        '"num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8, "parallel_attn": true, '
        '"vocab_size": 65024, "activation": "relu"}'
    )
    config = from_huggingface(fields, lambda name: "lm_head" not in name, "falcon").config
    assert (config.heads, config.kv_heads, config.head_dim, config.intermediate) == (128, 8, 64, 32768)
    assert (config.parallel, config.activation, config.gated, config.norm) == (True, "relu", False, "layer")

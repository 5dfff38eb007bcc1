"""PowerInfer's files: read as its converter writes them, with their predictors; hostile files are refused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from master.deployment.assignments import assignments
from master.deployment.stages import one_stage
from master.options import RunOptions
from master.workers.predictors import predictors_for
from tests.support.models import SIZES, TOKENS, TinyModel, forward
from tests.support.weights.gguf_models import byte_level_vocabulary, encoded
from tests.support.weights.packs import part
from tests.support.weights.powerinfer_models import (
    F32,
    powerinfer_tensors,
    predictor_of,
    write_falcon,
    write_opt,
    write_powerinfer,
    write_split,
)
from tpi.errors import ModelError
from tpi.net.messages import NodeOptions, PeerAddress
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.builder.quantise import decode_part
from tpi.pack.reader import Pack
from tpi.partition import FFN_UNIT
from tpi.sources.gguf import open_gguf
from tpi.sparsity.files import NAME, load_predictors
from tpi.sparsity.powerinfer import read_split
from tpi.sparsity.usage import MARKED, NeuronProfile, load_marks, save_marks, save_profile
from tpi.sparsity.usage import NAME as PROFILE
from worker.node_plan import node_plan
from worker.plan.predictors import frequencies_of, predictor_faults

HIDDEN, NEURONS, RANK = SIZES["hidden_size"], SIZES["intermediate_size"], 32


@pytest.fixture(scope="module")
def model() -> TinyModel:
    """A random Llama with ReLU."""
    import torch
    import transformers

    torch.manual_seed(11)
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, hidden_act="relu")).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.add_(torch.randn_like(parameter) * spread)
    return TinyModel(Path(), reference)


def predictors(rank: int = RANK) -> dict[int, tuple[F32, F32]]:
    return {layer: predictor_of(NEURONS, HIDDEN, rank, layer) for layer in range(2)}


def written(model: TinyModel, path: Path, **given: Any) -> Path:
    file = path / "tiny.powerinfer.gguf"
    write_powerinfer(file, model, powerinfer_tensors(model, predictors()), **given)
    return file


def packed(file: Path, dtype: str = "auto") -> Pack:
    pack_model(open_source(file), dtype, file.with_suffix(".pack"))
    return Pack.open(file.with_suffix(".pack"))


def reference_logits(model: TinyModel) -> F32:
    import torch

    with torch.no_grad():
        found: F32 = model.reference(torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    return found


def test_tokens_are_those_of_the_reference(model: TinyModel, tmp_path: Path) -> None:
    pack, expected = packed(written(model, tmp_path)), reference_logits(model)
    found = forward(pack, TOKENS)
    assert pack.config.activation == "relu"
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    np.testing.assert_array_equal(found.argmax(axis=1), expected.argmax(axis=1))


def test_bamboo_has_relu_of_gate_and_up(model: TinyModel, tmp_path: Path) -> None:
    pack = packed(written(model, tmp_path, architecture="bamboo"))
    assert (pack.config.activation, pack.config.family) == ("drelu", "bamboo")
    import torch

    originals = [layer.mlp.forward for layer in model.reference.model.layers]
    for layer in model.reference.model.layers:
        mlp = layer.mlp
        mlp.forward = lambda x, mlp=mlp: mlp.down_proj(torch.relu(mlp.gate_proj(x)) * torch.relu(mlp.up_proj(x)))
    expected = reference_logits(model)
    for layer, original in zip(model.reference.model.layers, originals, strict=True):
        layer.mlp.forward = original
    assert np.abs(forward(pack, TOKENS) - expected).max() < 1e-4 * np.abs(expected).max()


def randomised(model: Any) -> Any:
    """Add random numbers to all parameters of `model`, so that none keeps an initial 0 or 1, and return it."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.add_(torch.randn_like(parameter) * spread)
    return model


def falcon(norms: int, activation: str) -> Any:
    """A random Falcon of the newer kind."""
    import torch
    import transformers

    torch.manual_seed(5)
    config = transformers.FalconConfig(
        hidden_size=96, num_hidden_layers=2, num_attention_heads=6, num_kv_heads=2, new_decoder_architecture=True,
        num_ln_in_parallel_attn=norms, ffn_hidden_size=160, vocab_size=320, activation=activation,
    )  # fmt: skip
    reference = transformers.FalconForCausalLM._from_config(config, attn_implementation="eager").eval()
    return randomised(reference)


@pytest.mark.parametrize("norms", [1, 2])
def test_falcon_stands_side_by_side(norms: int, tmp_path: Path) -> None:
    reference = falcon(norms, "relu")
    write_falcon(tmp_path / "falcon.powerinfer.gguf", reference, predictors())
    pack, expected = packed(tmp_path / "falcon.powerinfer.gguf"), reference_logits(TinyModel(Path(), reference))
    found = forward(pack, TOKENS)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert (pack.config.activation, pack.config.parallel) == ("relu", True)
    assert list(load_predictors(pack.path / NAME)) == [0, 1]


def opt() -> Any:
    """A random OPT with a position table of 2050 rows, as all but the smallest published ones have."""
    import torch
    import transformers

    torch.manual_seed(7)
    config = transformers.OPTConfig(
        hidden_size=96, num_hidden_layers=2, num_attention_heads=6, ffn_dim=160, word_embed_proj_dim=96,
        vocab_size=320, max_position_embeddings=2048,
    )  # fmt: skip
    reference = transformers.OPTForCausalLM._from_config(config, attn_implementation="eager").eval()
    return randomised(reference)


def test_opt_has_its_positions_and_words(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    reference, file = opt(), tmp_path / "opt.powerinfer.gguf"
    write_opt(file, reference, predictors(), byte_level_vocabulary(tiny_model("llama").directory, None))
    pack, expected = packed(file), reference_logits(TinyModel(Path(), reference))
    found = forward(pack, TOKENS)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert (pack.config.family, pack.config.activation, pack.config.context) == ("opt", "relu", 2048)
    kept = load_predictors(pack.path / NAME)
    assert [kept[layer].input_kind for layer in range(2)] == ["residual", "residual"]
    pieces = Tokenizer.from_file(str(pack.tokenizer_file)).pre_tokenizer.pre_tokenize_str("it's 12345")
    assert [place for _, place in pieces] == [(0, 2), (2, 4), (4, 10)]


def test_opt_files_of_other_converters_are_refused(tmp_path: Path) -> None:
    write_opt(tmp_path / "opt.powerinfer.gguf", opt(), predictors(), context=2048)
    with pytest.raises(ModelError, match="context_length is 2048, but PowerInfer's OPT files have 2050"):
        packed(tmp_path / "opt.powerinfer.gguf")


@pytest.mark.parametrize(("pre", "ours"), [("falcon", False), ("falcon", True), (None, True)])
def test_falcon_has_its_words(
    pre: str | None, ours: bool, tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    """llama.cpp's files name the way of splitting text, PowerInfer's (`ours`) do not."""
    from tokenizers import Tokenizer

    write = byte_level_vocabulary(tiny_model("llama").directory, pre)
    reference = falcon(2, "relu" if ours else "gelu_pytorch_tanh")
    write_falcon(tmp_path / "falcon.gguf", reference, predictors() if ours else None, write)
    pack, expected = packed(tmp_path / "falcon.gguf"), reference_logits(TinyModel(Path(), reference))
    assert np.abs(forward(pack, TOKENS) - expected).max() < 1e-4 * np.abs(expected).max()
    tokenizer = Tokenizer.from_file(str(pack.tokenizer_file))
    pieces = [place for _, place in tokenizer.pre_tokenizer.pre_tokenize_str("``it's 12345")]
    assert pieces == [(0, 2), (2, 4), (4, 5), (5, 6), (6, 7), (7, 10), (10, 12)]


def test_predictors_are_kept_as_they_are(model: TinyModel, tmp_path: Path) -> None:
    pack = packed(written(model, tmp_path))
    found = load_predictors(pack.path / NAME)
    assert list(found) == [0, 1]
    for layer, (first, second) in predictors().items():
        one = found[layer]
        np.testing.assert_array_equal(one.first.values(), first)
        np.testing.assert_array_equal(one.second.values(), second)
        assert (one.threshold, one.ahead, one.input_kind, one.bias) == (0.25, 0, "residual", None)
        x = np.random.default_rng(0).standard_normal((2, HIDDEN)).astype(np.float32)
        np.testing.assert_allclose(one.scores(x), np.maximum(x @ first.T, 0) @ second.T, rtol=1e-4, atol=1e-3)


def test_a_file_without_predictors_is_a_model(model: TinyModel, tmp_path: Path) -> None:
    file = tmp_path / "plain.powerinfer.gguf"
    write_powerinfer(file, model, powerinfer_tensors(model, {}), threshold=None)
    pack = packed(file)
    assert not (pack.path / NAME).exists()


def test_the_codes_of_what_is_transposed_are_kept(model: TinyModel, tmp_path: Path) -> None:
    pack = packed(written(model, tmp_path, kind=lambda name: "Q4_0"))
    run = pack.layers[1][1].run("neuron")
    assert (run.layout, run.part("down").format) == ("record", "q4s")
    units = pack.layers[1][1].read_units("neuron", 0, run.units)
    down = powerinfer_tensors(model, {})["blk.1.ffn_down_t.weight"]
    at, size = run.part_offset("down"), run.part("down").vector_bytes(HIDDEN)
    stored = units.reshape(-1, run.record_bytes)[:, at : at + size]
    np.testing.assert_array_equal(stored[:NEURONS], encoded(down, "Q4_0"))
    assert decode_part(run.part("down"), run, units).shape == (run.units * 32, HIDDEN)
    assert load_predictors(pack.path / NAME)[0].first.weights == "q8"


def test_down_is_not_mistaken_for_what_other_files_have(model: TinyModel, tmp_path: Path) -> None:
    tensors = powerinfer_tensors(model, {})
    down = tensors["blk.0.ffn_down_t.weight"]
    write_powerinfer(tmp_path / "a.gguf", model, tensors)
    np.testing.assert_array_equal(part(packed(tmp_path / "a.gguf").layers[0][1], "neuron", "down")[:NEURONS], down)
    tensors["blk.0.ffn_down_t.weight"] = np.ascontiguousarray(down.T)
    write_powerinfer(tmp_path / "b.gguf", model, tensors)
    with pytest.raises(ModelError, match="ffn_down_t"):
        packed(tmp_path / "b.gguf")


def drawn_marks() -> dict[int, npt.NDArray[np.int32]]:
    return {layer: np.random.default_rng(layer).integers(0, 2, NEURONS).astype(np.int32) for layer in (0, 1)}


@pytest.mark.parametrize("where", ["split", "split of one layer", "i32", "f32"])
def test_neurons_for_a_gpu_are_marked_in_the_file_or_beside_it(where: str, model: TinyModel, tmp_path: Path) -> None:
    marks = drawn_marks()
    inside = {f"blk.{layer}.gpu_idx": values for layer, values in marks.items()}
    buckets = {f"blk.{layer}.gpu_bucket": np.flatnonzero(values).astype(np.int32) for layer, values in marks.items()}
    tensors = powerinfer_tensors(model, predictors())
    if where == "i32":
        tensors |= inside | buckets
    elif where == "f32":
        tensors |= {name: values.astype(np.float32) for name, values in inside.items()}
    else:
        marks = marks if where == "split" else {1: marks[1]}
        write_split(tmp_path / "tiny.powerinfer.gguf.generated.gpuidx", marks)
    write_powerinfer(tmp_path / "tiny.powerinfer.gguf", model, tensors)
    pack = packed(tmp_path / "tiny.powerinfer.gguf")
    found = load_marks(pack.path / MARKED, 2, NEURONS)
    assert found is not None
    for layer in range(2):
        np.testing.assert_array_equal(found[layer], marks.get(layer, np.zeros(NEURONS)))
    np.testing.assert_array_equal(forward(pack, TOKENS).argmax(axis=1), reference_logits(model).argmax(axis=1))


def test_what_is_marked_counts_as_hot_where_there_is_no_profile(model: TinyModel, tmp_path: Path) -> None:
    """On each of two nodes, for its own neurons; if there is a profile, it is used instead."""
    marks = drawn_marks()
    tensors = powerinfer_tensors(model, predictors())
    tensors |= {f"blk.{layer}.gpu_idx": values for layer, values in marks.items()}
    write_powerinfer(tmp_path / "tiny.powerinfer.gguf", model, tensors)
    pack = packed(tmp_path / "tiny.powerinfer.gguf")
    for first, last, often in frequencies(pack):
        assert often[0].shape == (last - first,)
        for layer, found in often.items():
            marked = marks[layer][first:last] == 1
            assert found[marked].min() > found[~marked].max() > 0
    counts = np.random.default_rng(0).integers(0, 9, (2, NEURONS))
    save_profile(
        pack.path / PROFILE, NeuronProfile("", 9, NEURONS, counts, np.zeros((2, 0, -(-NEURONS // 8)), np.uint8))
    )
    for first, last, often in frequencies(pack):
        np.testing.assert_allclose(often[1], counts[1, first:last] / 9, rtol=1e-6)


def frequencies(pack: Pack) -> Iterator[tuple[int, int, dict[int, Any]]]:
    """Return for each of two nodes its neurons, and their frequencies from the predictors that the master sends."""
    sent = predictors_for(RunOptions("the model", sparsity="static"), pack)
    stages = one_stage(pack, [2, 1])
    options = NodeOptions(context=64, pages=2, kv_dtype="f32", prefill_tokens=8, sparsity="static")
    peers = [PeerAddress(rank, "", "") for rank in range(2)]
    for shard, assign in zip(
        stages[0].shards,
        assignments(pack, stages, peers, options, 1, 1, "loopback", predictors=sent),
        strict=True,
    ):
        assert not any(predictor_faults(assign))
        assert sent is not None
        held: Any = [SimpleNamespace(vectors=sent.vectors.get(block.id, {})) for block in assign.blocks]
        part = shard.ffn.scaled(FFN_UNIT, NEURONS)
        yield part.first, part.last, frequencies_of(node_plan(assign), held)


def test_marks_of_another_model_are_refused(tmp_path: Path) -> None:
    assert load_marks(tmp_path / "marks", 2, 40) is None
    save_marks(tmp_path / "marks", np.ones((2, 40), np.bool_))
    with pytest.raises(ModelError, match="this one has 2 layers"):
        load_marks(tmp_path / "marks", 2, 48)
    (tmp_path / "marks").write_bytes(b"PK")
    with pytest.raises(ModelError, match=str(tmp_path / "marks")):
        load_marks(tmp_path / "marks", 2, 40)


@pytest.mark.parametrize("fault", ["length", "mark", "magic"])
def test_a_split_file_of_another_model_is_refused(fault: str, model: TinyModel, tmp_path: Path) -> None:
    marks = np.zeros(NEURONS + (32 if fault == "length" else 0), np.int32)
    marks[5] = 7 if fault == "mark" else 1
    write_split(tmp_path / "split", {0: marks})
    if fault == "magic":
        content = (tmp_path / "split").read_bytes()
        (tmp_path / "split").write_bytes(b"GGUF" + content[4:])
    opened = open_source(written(model, tmp_path))
    opened.source.close()
    with pytest.raises(ModelError, match=str(tmp_path / "split")):
        read_split(tmp_path / "split", opened.model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"blk.0.fc1.weight": None}, "only one of blk.0.fc1.weight and blk.0.fc2.weight"),
        ({"blk.1.fc2.weight": np.zeros((NEURONS, RANK + 1), np.float32)}, "blk.1.fc2.weight has shape"),
        ({"blk.1.fc1.weight": np.full((RANK, HIDDEN), np.nan, np.float32)}, "infinite or NaN"),
        ({"blk.1.fc3.weight": np.zeros((RANK, HIDDEN), np.float32)}, "blk.1.fc3.weight"),
        ({"blk.7.fc9.bias": np.zeros(3, np.float32)}, "blk.7.fc9.bias"),
    ],
)
def test_a_predictor_that_does_not_fit_is_refused(
    change: dict[str, Any], words: str, model: TinyModel, tmp_path: Path
) -> None:
    tensors = powerinfer_tensors(model, predictors()) | change
    file = tmp_path / "odd.powerinfer.gguf"
    write_powerinfer(file, model, {name: values for name, values in tensors.items() if values is not None})
    with pytest.raises(ModelError, match=words):
        packed(file)
    assert not file.with_suffix(".pack").exists()


@given(data=st.data())
@settings(max_examples=100)
def test_a_mutated_file_opens_or_is_refused(
    data: st.DataObject, model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("mutated")
    file = written(model, path)
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 2500))] = data.draw(st.integers(0, 255))
    file.write_bytes(bytes(content[: data.draw(st.sampled_from([len(content), 2000, 30]))]))
    refusal = ""
    try:
        open_gguf(file).close()
    except ModelError as error:
        refusal = str(error)
    assert not refusal or str(file) in refusal

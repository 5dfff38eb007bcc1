"""Packs made from GGUF files: bit-exact if a format exists for the source's type, otherwise with a report."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFWriter

from tests.support.models import SIZES, TEMPLATE, TEXT, TOKENS, TinyModel, forward, make_model
from tests.support.weights.gguf_models import (
    byte_level_vocabulary,
    decoded,
    gguf_tensors,
    interleave,
    sentencepiece_tokens,
    sentencepiece_vocabulary,
    write_gguf,
)
from tests.support.weights.packs import part, runs
from tpi.errors import ModelError
from tpi.kernels import open_kernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.builder.ggufvocab import _scored_merges
from tpi.pack.reader import Pack

F32 = npt.NDArray[np.float32]
Models: TypeAlias = Callable[[str], TinyModel]

GGUF_NAMES = {"o": "attn_output", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}


def pack_of(path: Path, dtype: str = "auto") -> Pack:
    target = path.with_name(f"{path.stem}-{dtype}")
    pack_model(open_source(path), dtype, target)
    pack = Pack.open(target)
    pack.verify()
    return pack


def expected(model: TinyModel, layer: int, item: str, kind: str) -> F32:
    """Return the vectors of a part if its matrix, as it is in the file, has the type `kind`."""
    values = decoded(gguf_tensors(model, "llama")[f"blk.{layer}.{GGUF_NAMES.get(item, f'attn_{item}')}.weight"], kind)
    if item in ("q", "k"):
        size = model.reference.config.head_dim
        order = interleave(np.arange(len(values)), size)
        values = values[np.argsort(order)]
    return values.T if item in ("o", "down") else values


@pytest.mark.parametrize(
    ("kind", "format"),
    [("Q4_0", "q4s"), ("Q4_1", "q4"), ("Q8_0", "q8"), ("F16", "f16"), ("F32", "f32"), ("BF16", "bf16")],
)
@pytest.mark.parametrize("dtype", ["auto", "f32"])
def test_every_value_is_kept(kind: str, format: str, dtype: str, tiny_model: Models, tmp_path: Path) -> None:
    model = tiny_model("llama")
    write_gguf(tmp_path / "m.gguf", model, "llama", lambda name: kind)
    pack = pack_of(tmp_path / "m.gguf", dtype)
    for layer, halves in enumerate(pack.layers):
        for half in halves:
            for run, item in runs(half):
                assert half.run(run).part(item).format == (format if dtype == "auto" else "f32")
                values = expected(model, layer, item, kind)
                np.testing.assert_array_equal(part(half, run, item)[: len(values)], values)
    table = decoded(gguf_tensors(model, "llama")["token_embd.weight"], kind)
    np.testing.assert_array_equal(part(pack.embedding, "row", "row")[: len(table)], table)
    assert not pack.config.tied


def test_formats_are_those_of_each_tensor(
    tiny_model: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {"ffn_gate": "Q4_0", "ffn_up": "Q8_0", "ffn_down": "Q4_1", "attn_k": "F32", "attn_v": "Q8_0"}

    def kind(name: str) -> str:
        return kinds.get(name.split(".")[2], "Q4_0") if name.startswith("blk.0") else "Q8_0"

    model = tiny_model("llama")
    write_gguf(tmp_path / "m.gguf", model, "llama", kind)
    pack = pack_of(tmp_path / "m.gguf")
    attention, ffn = pack.layers[0]
    assert [item.format for item in ffn.run("neuron").parts] == ["q4s", "q8", "q4"]
    assert [item.format for item in attention.run("kv").parts] == ["q8", "q8"]  # k is in F32
    assert "re-quantised: F32 as q8" in capsys.readouterr().err
    assert attention.run("kv").width == pack.layers[1][0].run("kv").width
    for half in (attention, ffn):
        for run, item in runs(half):
            name = f"blk.0.{GGUF_NAMES.get(item, f'attn_{item}')}.weight"
            found, values = part(half, run, item), expected(model, 0, item, kind(name))
            if item == "k":
                np.testing.assert_allclose(found, values, atol=np.abs(values).max() / 200)
            else:
                np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("llama", "llama"),
        *((name, name) for name in ("qwen2", "qwen3", "phi3", "gemma2", "gemma3", "smollm3", "granite")),
    ],
)
def test_logits_equal_those_of_transformers(name: str, family: str, tiny_model: Models, tmp_path: Path) -> None:
    import torch

    model = tiny_model(name)
    write_gguf(tmp_path / "m.gguf", model, family)
    pack = pack_of(tmp_path / "m.gguf")
    config = model.reference.config
    pack.manifest.config.__dict__.update(_not_in_gguf(name, config))
    with torch.no_grad():
        logits = model.reference(torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(forward(pack, TOKENS, open_kernels("reference")), logits, atol=1e-4)


def _not_in_gguf(name: str, config: object) -> dict[str, object]:
    """Return settings of these tiny models that llama.cpp's metadata cannot express."""
    if name == "qwen2":
        return {"windows": (0, 12)}
    if name == "smollm3":
        return {"rope_kinds": (1, 0)}
    return {"attention_scale": config.query_pre_attn_scalar**-0.5} if name in ("gemma2", "gemma3") else {}  # type: ignore[attr-defined]


def test_rope_frequencies_of_the_file(tiny_model: Models, tmp_path: Path) -> None:
    factors = np.array([1, 1, 1.5, 2, 3, 8, 8, 8], np.float32)
    write_gguf(tmp_path / "m.gguf", tiny_model("llama"), "llama", extra={"rope_freqs.weight": factors})
    plain = np.float32(1) / np.float32(10000) ** (np.arange(0, 16, 2, dtype=np.float32) / 16)
    np.testing.assert_array_equal(np.asarray(pack_of(tmp_path / "m.gguf").config.inv_freq, np.float32), plain / factors)


def test_tied_embedding_is_one_block(tiny_model: Models, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model("llama3"), "llama")
    pack = pack_of(tmp_path / "m.gguf")
    assert pack.config.tied
    assert pack.head is pack.embedding


@pytest.fixture
def whole_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TinyModel:
    """Return a model whose matrices have rows of at least 256 values, which super-blocks need."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    for name, size in sizes.items():
        monkeypatch.setitem(SIZES, name, size)
    return make_model("llama", tmp_path / "hf")


@pytest.mark.parametrize(
    ("kind", "format", "error"),
    [("Q4_K", "q4", 6e-4), ("Q6_K", "q6", 0), ("Q5_0", "q5", 0)],
)
def test_codes_of_super_blocks_are_kept(
    kind: str, format: str, error: float, whole_blocks: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "m.gguf", whole_blocks, "llama", lambda name: kind)
    pack, exact = pack_of(tmp_path / "m.gguf"), pack_of(tmp_path / "m.gguf", "f32")
    assert "re-quantised" not in capsys.readouterr().err
    attention, ffn = pack.layers[1]
    for half, of in ((attention, exact.layers[1][0]), (ffn, exact.layers[1][1])):
        for run, item in runs(half):
            assert half.run(run).part(item).format == format
            values = expected(whole_blocks, 1, item, kind)
            np.testing.assert_array_equal(part(of, run, item), values)
            found = part(half, run, item)
            assert np.linalg.norm(found - values) <= error * np.linalg.norm(values)


@pytest.mark.parametrize("family", ["mamba", "bloom"])
def test_unsupported_architecture_is_named(family: str, tiny_model: Models, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model("llama"), family)
    with pytest.raises(
        ModelError, match=rf"architecture '{family}', which is not supported; docs/models.md lists what is"
    ):
        open_source(tmp_path / "m.gguf")


@pytest.mark.parametrize(("family", "words"), [("qwen4exp", "hyper-connections"), ("deepseek4", "hyper-connections")])
def test_known_architectures_are_refused_with_a_way_out(
    family: str, words: str, tiny_model: Models, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model("llama"), family)
    with pytest.raises(ModelError, match=rf"architecture '{family}' \(.*{words}.*(use|take) "):
        open_source(tmp_path / "m.gguf")


def test_vocabulary_becomes_the_same_tokenizer(tiny_model: Models, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    model = tiny_model("llama")
    write_gguf(tmp_path / "m.gguf", model, "llama", vocabulary=byte_level_vocabulary(model.directory))
    pack = pack_of(tmp_path / "m.gguf")
    ours = Tokenizer.from_file(str(pack.tokenizer_file))
    theirs = Tokenizer.from_file(str(model.directory / "tokenizer.json"))
    text = f"<|im_start|>user\n{TEXT} naïve 日本 \t\n 12345<|im_end|>"
    assert ours.encode(text).ids == theirs.encode(text).ids
    assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    info = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "bos_id": 1, "eos_ids": [2], "add_bos": False}
    assert pack.tokenizer_info == info | {"chat_template": TEMPLATE}


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabulary(prefix: bool, tiny_model: Models, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokens = sentencepiece_tokens(TEXT)
    write_gguf(tmp_path / "m.gguf", tiny_model("llama"), "llama", vocabulary=sentencepiece_vocabulary(tokens, prefix))
    pack = pack_of(tmp_path / "m.gguf")
    tokenizer = Tokenizer.from_file(str(pack.tokenizer_file))
    assert (pack.tokenizer_info["add_bos"], pack.tokenizer_info["eos_ids"]) == (True, [2])

    def pieces(text: str) -> list[str]:
        return [tokens[token] for token in tokenizer.encode(text).ids]

    space = "\u2581"
    assert pieces("the capital") == ["<s>", f"{space}the" if prefix else "the", f"{space}capital"]
    assert pieces(" \u65e5")[-3:] == ["<0xE6>", "<0x97>", "<0xA5>"]
    assert pieces("a</s>")[-1] == "</s>"
    for text in (TEXT, "  two  spaces\n\n\u65e5 na\u00efve"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_vocabulary_that_does_not_fit_together_is_refused(tiny_model: Models, tmp_path: Path) -> None:
    model = tiny_model("llama")
    vocabulary = byte_level_vocabulary(model.directory)

    def broken(writer: GGUFWriter) -> None:
        vocabulary(writer)
        writer.kv_data[0]["tokenizer.ggml.merges"].value[0] = "no such"

    write_gguf(tmp_path / "m.gguf", model, "llama", vocabulary=broken)
    with pytest.raises(ModelError, match="vocabulary that does not fit together"):
        pack_of(tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("where", ["gguf", "jinja"])
def test_a_template_that_is_not_utf8_is_refused(where: str, tiny_model: Models, tmp_path: Path) -> None:
    model = tiny_model("llama")
    source = tmp_path / "m.gguf"
    if where == "gguf":
        write_gguf(source, model, "llama", vocabulary=byte_level_vocabulary(model.directory))
        raw = source.read_bytes()
        source.write_bytes(raw.replace(b"{% for message", b"{% f\xffr message"))
    else:
        source = tmp_path / "hf"
        copytree(model.directory, source)
        settings = json.loads((source / "tokenizer_config.json").read_text())
        del settings["chat_template"]
        (source / "tokenizer_config.json").write_text(json.dumps(settings))
        (source / "chat_template.jinja").write_bytes(b"{{ '\xff' }}")
    with pytest.raises(ModelError, match=r"template.* is not UTF-8"):
        pack_model(open_source(source), "f32", tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Counted(str):
    """A text that counts the characters that are cut out of it."""

    characters = 0

    def __getitem__(self, key: Any) -> str:
        found = super().__getitem__(key)
        Counted.characters += len(found)
        return found


def test_merges_take_time_in_proportion_to_the_vocabulary() -> None:
    costs = []
    for count in (1000, 2000, 4000):
        Counted.characters = 0
        pieces = {Counted("ab" * 100 + f"{number:08}"): 0.0 for number in range(count)}
        assert _scored_merges(pieces | {"a": 1.0}) == []
        costs.append(Counted.characters / count)
    assert max(costs) < 1.01 * min(costs)


def test_a_piece_beyond_reason_is_refused_at_once(tiny_model: Models, tmp_path: Path) -> None:
    tokens = sentencepiece_tokens(TEXT)
    tokens[-1] = "a" * 1_000_000
    write_gguf(tmp_path / "m.gguf", tiny_model("llama"), "llama", vocabulary=sentencepiece_vocabulary(tokens, True))
    with pytest.raises(ModelError, match=r"'aaaa.* 1000000 characters, more than 256"):
        pack_of(tmp_path / "m.gguf")


def test_merges_of_pieces() -> None:
    found = _scored_merges({"a": -1.0, "b": -2.0, "ab": -4.0, "aba": -3.0, "ba": -5.0})
    assert found == [("a", "ba"), ("ab", "a"), ("a", "b"), ("b", "a")]

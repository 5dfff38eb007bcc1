"""Packs: exact values, formats and layouts, equal blocks stored once, bounded slabs, damage found and named."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.entries import ENTRIES
from tests.support.models import MIXTURES, MODELS, RECURRENT, SIZES, TinyModel, forward, make_model
from tests.support.weights.packs import part, runs
from tpi.errors import ModelError, WeightsError
from tpi.kernels import open_kernels
from tpi.pack.builder import build, plan, writer
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack, PackBlock
from tpi.sources import base

F32 = npt.NDArray[np.float32]
Models: TypeAlias = Callable[[str], TinyModel]
Packs: TypeAlias = Callable[..., Pack]


def expected_parts(model: TinyModel, layer: int) -> dict[str, F32]:
    """Return the matrices of a layer as vectors of length hidden, read from transformers' modules."""
    weights = {name: tensor.numpy() for name, tensor in model.reference.state_dict().items()}
    config = model.reference.config
    opt = config.model_type == "opt"
    at = f"model.{'decoder.' if opt else ''}layers.{layer}."
    found = {"o": weights[f"{at}self_attn.{'out' if opt else 'o'}_proj.weight"].T}
    if config.model_type == "phi3":
        size = config.hidden_size // config.num_attention_heads
        cuts = [config.num_attention_heads * size, (config.num_attention_heads + config.num_key_value_heads) * size]
        found |= dict(zip("qkv", np.split(weights[f"{at}self_attn.qkv_proj.weight"], cuts), strict=True))
        found |= dict(zip(("gate", "up"), np.split(weights[f"{at}mlp.gate_up_proj.weight"], 2), strict=True))
    else:
        found |= {name: weights[f"{at}self_attn.{name}_proj.weight"] for name in "qk"}
        found["v"] = weights.get(f"{at}self_attn.v_proj.weight", found["k"])  # Gemma 4: some layers have none
        if not opt:
            found |= {name: weights[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up")}
    down = weights[f"{at}fc2.weight" if opt else f"{at}mlp.down_proj.weight"]
    return found | {"down": down.T} | ({"up": weights[f"{at}fc1.weight"]} if opt else {})


@pytest.mark.parametrize(
    "name", [name for name in MODELS if name not in (*MIXTURES, *RECURRENT, *ENTRIES, "gemma4moe")]
)
def test_f32_pack_holds_exactly_the_weights(name: str, tiny_model: Models, tiny_pack: Packs) -> None:
    model, pack = tiny_model(name), tiny_pack(name)
    pack.verify()
    for layer, halves in enumerate(pack.layers):
        expected = expected_parts(model, layer)
        found = {item: part(half, run, item) for half in halves for run, item in runs(half)}
        assert found.keys() == expected.keys()
        for item, values in expected.items():
            np.testing.assert_array_equal(found[item][: len(values)], values)
            assert not found[item][len(values) :].any()
    table = model.reference.get_input_embeddings().weight.detach().numpy()
    np.testing.assert_array_equal(part(pack.embedding, "row", "row")[: len(table)], table)
    assert (pack.head is pack.embedding) == pack.config.tied


def test_vectors_are_those_of_the_model(tiny_model: Models, tiny_pack: Packs) -> None:
    weights = {name: tensor.numpy() for name, tensor in tiny_model("gemma2").reference.state_dict().items()}
    attention, ffn = tiny_pack("gemma2").layers[1]
    at = "model.layers.1."
    np.testing.assert_array_equal(attention.vectors()["norm"], weights[f"{at}input_layernorm.weight"] + 1)
    np.testing.assert_array_equal(ffn.vectors()["post_norm"], weights[f"{at}post_feedforward_layernorm.weight"] + 1)
    opt = {name: tensor.numpy() for name, tensor in tiny_model("opt").reference.state_dict().items()}
    vectors = tiny_pack("opt").layers[0][1].vectors()
    assert set(vectors) == {"norm", "norm.bias", "up.bias", "down.bias"}
    np.testing.assert_array_equal(vectors["up.bias"], opt["model.decoder.layers.0.fc1.bias"])


@pytest.mark.parametrize(("dtype", "limit"), [("bf16", 0.003), ("q8", 0.01), ("q4", 0.09), ("q4s", 0.12)])
@pytest.mark.parametrize("name", ["llama", "opt", "gemma2", "qwen3"])
def test_rounded_pack_is_near_the_weights(
    name: str, dtype: str, limit: float, tiny_model: Models, tiny_pack: Packs
) -> None:
    pack = tiny_pack(name, dtype)
    for layer, halves in enumerate(pack.layers):
        expected = expected_parts(tiny_model(name), layer)
        for half in halves:
            for run, item in runs(half):
                layout, values = half.run(run), expected[item]
                shared = dtype.startswith("q4") and item in ("k", "v") and pack.config.heads > pack.config.kv_heads
                assert layout.part(item).format == ("q8" if shared else dtype)
                records = dtype == "bf16" or (name == "opt" and run == "neuron")
                assert layout.layout == ("record" if records else "tiled")
                found = part(half, run, item)
                assert np.linalg.norm(found[: len(values)] - values) < limit * np.linalg.norm(values)
                assert layout.part(item).axis == "column" or not found[len(values) :].any()
    row = pack.embedding.run("row").parts[0].format
    assert row == ("q8" if dtype.startswith("q4") else dtype)
    assert pack.layers[0][0].run("query").width == (
        32 if dtype[0] == "q" and pack.config.head_dim == 16 else pack.config.head_dim
    )


def test_auto_keeps_the_formats_of_the_source(tmp_path: Path) -> None:
    for dtype, kept in (("bfloat16", "bf16"), ("float16", "f16"), ("float32", "f32")):
        model = make_model("llama", tmp_path / dtype, dtype)
        pack_model(open_source(model.directory), "auto", tmp_path / f"{dtype}-pack")
        pack = Pack.open(tmp_path / f"{dtype}-pack")
        for half in pack.layers[0]:
            assert {item.format for run in half.shape.runs for item in run.parts} == {kept}
        np.testing.assert_array_equal(part(pack.layers[1][0], "query", "q"), expected_parts(model, 1)["q"])


def test_block_files_are_safetensors(tiny_pack: Packs) -> None:
    block = tiny_pack("qwen2").layers[0][0]
    tensors = safetensors.numpy.load_file(block.path)
    assert set(tensors) == {"query", "kv", "query.hash", "kv.hash", "norm", "q.bias", "k.bias", "v.bias"}
    np.testing.assert_array_equal(tensors["kv"], block.read_units("kv", 0, block.run("kv").units))
    np.testing.assert_array_equal(tensors["kv.hash"], block.unit_hashes("kv"))
    assert block.offset("query") % 4096 == 0
    assert block.path.stem == block.id


def test_any_run_of_units_is_one_byte_range(tiny_pack: Packs) -> None:
    block = tiny_pack("llama").layers[0][1]
    whole = block.read_units("neuron", 0, 5)
    raw = block.path.read_bytes()[block.offset("neuron", 1) : block.offset("neuron", 4)]
    assert raw == whole[1:4].tobytes()
    np.testing.assert_array_equal(block.read_units("neuron", 1, 4), whole[1:4])
    assert block.read_units("neuron", 2, 2).shape == (0, whole.shape[1])
    with pytest.raises(WeightsError, match="units 3 to 6 of neuron"):
        block.read_units("neuron", 3, 6)


def test_a_full_disk_is_refused_with_the_way_out(
    tiny_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_SPARE", 1 << 60)
    with pytest.raises(
        WeightsError, match=r"^disk full: .* MiB free; free some space, or .* \(TPI_CACHE moves the cache"
    ):
        pack_model(open_source(tiny_model("llama").directory), "q4", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_equal_blocks_are_stored_once(tiny_model: Models, tmp_path: Path) -> None:
    source = tiny_model("llama").directory
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = safetensors.numpy.load_file(source / "model.safetensors")
    for name in weights:
        if ".layers.1.self_attn." in name or "layers.1.input_layernorm" in name:
            weights[name] = weights[name.replace("layers.1", "layers.0")]
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    pack_model(open_source(tmp_path), "q8", tmp_path / "pack")
    pack = Pack.open(tmp_path / "pack")
    assert pack.layers[0][0] is pack.layers[1][0]
    assert pack.layers[0][1].id != pack.layers[1][1].id
    files = {path.stem for path in (tmp_path / "pack").glob("*.safetensors")}
    assert files == set(pack.blocks)


def test_layers_of_one_source_are_written_once(
    tiny_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_source(tiny_model("llama").directory)
    model = replace(opened.model, config=replace(opened.model.config, layers=80), layers=(opened.model.layers[1],) * 80)
    model = replace(model, ignored_tensors=("*",))  # layer 0 is left out on purpose
    reads: list[str] = []
    read = base.FileSource.read

    def watched(self: base.FileSource, tensor: base.SourceTensor, *bounds: Any) -> npt.NDArray[np.uint8]:
        reads.append(tensor.name)
        return read(self, tensor, *bounds)

    monkeypatch.setattr(base.FileSource, "read", watched)
    pack_model(replace(opened, model=model), "q8", tmp_path / "pack")
    pack = Pack.open(tmp_path / "pack")
    assert len(pack.layers) == 80
    assert len(pack.blocks) == 5  # attention, ffn, embedding, head, final norm
    assert len(reads) == len(set(reads))


@pytest.mark.parametrize(("name", "dtype"), [("phi3", "f32"), ("llama", "q4"), ("opt", "q8")])
def test_small_slabs_give_the_same_pack(
    name: str, dtype: str, tiny_model: Models, tiny_pack: Packs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SLAB_BYTES", 40_000)
    monkeypatch.setattr(writer, "STEP_VALUES", 4_000)
    monkeypatch.setattr(base, "CHUNK_BYTES", 5_000)
    sizes: list[int] = []
    read = base.FileSource.read

    def watched(self: base.FileSource, *arguments: Any) -> npt.NDArray[np.uint8]:
        raw = read(self, *arguments)
        sizes.append(raw.nbytes)
        return raw

    monkeypatch.setattr(base.FileSource, "read", watched)
    pack_model(open_source(tiny_model(name).directory), dtype, tmp_path / "pack")
    assert Pack.open(tmp_path / "pack").manifest.layers == tiny_pack(name, dtype).manifest.layers
    assert max(sizes) <= 40_000


def test_odd_heads_fill_the_last_unit_with_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"hidden_size": 160, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 20}.items():
        monkeypatch.setitem(SIZES, name, size)
    opened = open_source(make_model("llama", tmp_path / "hf").directory)
    packs = []
    for dtype in ("f32", "q8"):
        pack_model(opened, dtype, tmp_path / dtype)
        packs.append(Pack.open(tmp_path / dtype))
    attention = packs[1].layers[0][0]
    assert [(run.units, run.width) for run in attention.shape.runs] == [(1, 160), (3, 40)]
    assert not part(attention, "query", "q")[100:].any()
    exact, rounded = (forward(pack, [1, 5, 99, 30, 2, 7], open_kernels("reference")) for pack in packs)
    assert np.abs(exact - rounded).max() < 0.05 * np.ptp(exact)


def test_unknown_dtype_and_odd_hidden_size_are_named(tiny_model: Models, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"--dtype q3 .* q4s"):
        pack_model(open_source(tiny_model("llama").directory), "q3", tmp_path / "pack")
    model = open_source(tiny_model("llama").directory).model
    fields = {**model.config.to_dict(), "hidden": 100}
    with pytest.raises(ModelError, match="100 is not a multiple of 32; use --dtype f32 or bf16"):
        plan._Geometry(model.config.from_dict(fields), {"query", "kv"}).table(model.embedding, "q8", 320)


@pytest.fixture
def copy(tiny_pack: Packs, tmp_path: Path) -> Path:
    """Return a copy of a pack, which a test may damage."""
    target = tmp_path / "pack"
    target.mkdir()
    for file in tiny_pack("llama").path.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_missing_and_short_files_are_named(copy: Path) -> None:
    block = Pack.open(copy).layers[1][0].path
    raw = block.read_bytes()
    block.write_bytes(raw[:-1])
    with pytest.raises(WeightsError, match=f"{block.name} has {len(raw) - 1} bytes instead of {len(raw)}"):
        Pack.open(copy)
    block.unlink()
    with pytest.raises(WeightsError, match=f"{block.name} is missing"):
        Pack.open(copy)


def test_file_that_disappears_or_shrinks_later_is_named(copy: Path) -> None:
    block = Pack.open(copy).layers[1][0]
    block.read_units("kv", 0, 1)
    block.path.write_bytes(block.path.read_bytes()[:5000])
    with pytest.raises(WeightsError, match=r"too short"):
        block.read_units("query", 0, 6)
    block.path.unlink()
    with pytest.raises(WeightsError, match=f"cannot read .*{block.path.name}"):
        block.unit_hashes("kv")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_is_found(
    data: st.DataObject, tiny_pack: Packs, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = tiny_pack("llama").layers[0][0]
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    raw = bytearray(source.path.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    block = PackBlock(path, source.id, source.shape)
    with pytest.raises(WeightsError, match=r"flipped.safetensors is damaged"):
        block.verify()
    flipped = [run.name for run in block.shape.runs if not _equal(block, source, run.name)]
    for run in flipped:
        with pytest.raises(WeightsError, match=f"unit . of {run} does not match its hash"):
            block.read_units(run, 0, block.run(run).units, check=True)


def _equal(block: PackBlock, source: PackBlock, run: str) -> bool:
    """Return True if the units and hashes of a run are unchanged, or if the file cannot be read at all."""
    units = source.run(run).units
    try:
        same = np.array_equal(block.read_units(run, 0, units), source.read_units(run, 0, units))
        return same and np.array_equal(block.unit_hashes(run), source.unit_hashes(run))
    except WeightsError:
        return True


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_mutated_manifest_is_read_or_refused(
    data: st.DataObject, tiny_pack: Packs, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.getbasetemp()
    fields = json.loads((tiny_pack("llama").path / "manifest.json").read_text())
    where: Any = fields
    for _ in range(data.draw(st.integers(0, 5))):
        keys = sorted(where) if isinstance(where, dict) else list(range(len(where))) if isinstance(where, list) else []
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if not isinstance(where[key], dict | list) or data.draw(st.booleans()):
            where[key] = data.draw(
                st.none() | st.integers(-(1 << 64), 1 << 64) | st.text(max_size=5) | st.floats()
                | st.lists(st.integers()) | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
            )  # fmt: skip
            break
        where = where[key]
    (directory / "manifest.json").write_text(json.dumps(fields))
    with suppress(ModelError, WeightsError):
        Pack.open(directory)


def test_other_versions_and_other_directories_are_refused(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*manifest\.json"):
        Pack.open(tmp_path)
    fields = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(fields | {"tpi_pack": 99}))
    with pytest.raises(ModelError, match="pack version 99"):
        Pack.open(copy)
    (copy / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="cannot be used"):
        Pack.open(copy)


def test_tokenizer_of_a_directory(tiny_model: Models, tiny_pack: Packs) -> None:
    from tokenizers import Tokenizer

    from tests.support.models import TEMPLATE, TEXT

    pack = tiny_pack("llama")
    info = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "bos_id": 1, "eos_ids": [2], "add_bos": False}
    assert pack.tokenizer_info == info | {"chat_template": TEMPLATE}
    original = Tokenizer.from_file(str(tiny_model("llama").directory / "tokenizer.json"))
    assert Tokenizer.from_file(str(pack.tokenizer_file)).encode(TEXT).ids == original.encode(TEXT).ids


def test_bos_is_added_where_the_model_wants_it(tiny_model: Models, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    for file in tiny_model("llama").directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    templates = [{"name": "tool", "template": "x"}, {"name": "default", "template": "y"}]
    changed = settings | {"add_bos_token": True, "chat_template": templates, "bos_token": {"content": "<|im_start|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(changed))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7, 4000]}))
    pack_model(open_source(tmp_path), "f32", tmp_path / "pack")
    pack = Pack.open(tmp_path / "pack")
    assert (pack.tokenizer_info["add_bos"], pack.tokenizer_info["chat_template"]) == (True, "y")
    assert pack.tokenizer_info["eos_ids"] == [2, 7]
    assert Tokenizer.from_file(str(pack.tokenizer_file)).encode("France").ids[0] == 1


def test_model_without_tokenizer_says_so_when_asked(tiny_model: Models, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny_model("llama").directory / name).read_bytes())
    pack_model(open_source(tmp_path), "f32", tmp_path / "pack")
    pack = Pack.open(tmp_path / "pack")
    assert not pack.tokenizer_info
    with pytest.raises(ModelError, match=r"has no tokenizer; put tokenizer\.json"):
        _ = pack.tokenizer_file
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        pack_model(open_source(tmp_path), "f32", tmp_path / "other")

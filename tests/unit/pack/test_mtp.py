"""The layer for multi-token prediction in packs: its names in both kinds of files, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

from master.deployment.mtp import one_layer
from tests.support.models import TinyModel
from tests.support.weights import gguf_delta, gguf_entries, gguf_experts, gguf_nemotron, mtp_apart, mtp_delta
from tests.support.weights.gguf_delta import write_gguf as write_delta
from tests.support.weights.gguf_experts import write_experts
from tests.support.weights.mtp import LAYERS, make_mtp
from tpi.errors import ModelError
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.manifest import Manifest
from tpi.pack.reader import Pack

_NEXTN = {
    "eh_proj.weight": "nextn.eh_proj.weight", "enorm.weight": "nextn.enorm.weight",
    "hnorm.weight": "nextn.hnorm.weight", "shared_head.norm.weight": "nextn.shared_head_norm.weight",
    "embed_tokens.weight": "nextn.embed_tokens.weight", "shared_head.head.weight": "nextn.shared_head_head.weight",
}  # fmt: skip


@pytest.mark.parametrize("family", ["deepseek3", "glm4moe"])
def test_both_kinds_of_files_give_the_same_layer(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_mtp(family, tmp_path / "model")
    weights = load_file(model.directory / "model.safetensors")
    own = {name: weights[f"model.layers.{LAYERS}.{end}"].numpy() for end, name in _NEXTN.items()}
    tensors, describe = gguf_experts.tensors, gguf_experts._describe

    def described(writer: GGUFWriter, family: str, config: Any) -> None:
        describe(writer, family, config)
        writer.add_nextn_predict_layers(1)

    monkeypatch.setattr(gguf_experts, "_describe", described)
    monkeypatch.setattr(
        gguf_experts,
        "tensors",
        lambda *of: tensors(*of) | {f"blk.{LAYERS}.{name}": values for name, values in own.items()},
    )
    write_experts(tmp_path / "m.gguf", model, family)
    for source in (model.directory, tmp_path / "m.gguf"):
        pack_model(open_source(source), "f32", tmp_path / f"{source.name}.pack")
    one, other = (Pack.open(tmp_path / name) for name in ("model.pack", "m.gguf.pack"))
    assert len(one.mtp) == 4
    assert one.manifest.mtp == other.manifest.mtp
    assert one.manifest.layers == other.manifest.layers


def test_a_file_without_one_of_its_tensors_has_no_layer(tmp_path: Path) -> None:
    model = make_mtp("glm4moe", tmp_path / "model")
    file = model.directory / "model.safetensors"
    weights = load_file(file)
    del weights[f"model.layers.{LAYERS}.hnorm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    pack_model(open_source(model.directory), "q4", tmp_path / "pack")
    assert not Pack.open(tmp_path / "pack").mtp


def test_a_damaged_layer_is_seen(tmp_path: Path) -> None:
    pack_model(open_source(make_mtp("glm4moe", tmp_path / "model").directory), "q4", tmp_path / "pack")
    path = tmp_path / "pack" / "manifest.json"
    fields = json.loads(path.read_text())
    projection, norms, attention, experts = fields["mtp"]
    Manifest.load(path)
    for wrong in (
        [projection],
        [norms, norms, attention],
        [projection, attention, attention],
        [projection, norms, norms],
    ):
        path.write_text(json.dumps(fields | {"mtp": wrong}))
        with pytest.raises(ModelError, match="cannot be used"):
            Manifest.load(path)
    assert experts in fields["blocks"]


@pytest.mark.parametrize("family", mtp_delta.FAMILIES)
def test_both_kinds_of_files_give_the_same_layer_beside_deltanet(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write the GGUF file as llama.cpp's converter does, which adds 1 to the weights of norms."""
    model = mtp_delta.make_delta_mtp(family, tmp_path / "model")
    own, tensors = mtp_delta.own_tensors(model), gguf_delta.tensors
    names = dict(zip(own, ("eh_proj", "enorm", "hnorm", "shared_head_norm"), strict=True))
    more = {
        f"blk.{mtp_delta.LAYERS}.nextn.{names[end]}.weight": values + (0 if end == "fc" else 1)
        for end, values in own.items()
    }
    monkeypatch.setattr(gguf_delta, "tensors", lambda *of: tensors(*of) | more)
    write_delta(tmp_path / "m.gguf", model, family, vocabulary=lambda writer: writer.add_nextn_predict_layers(1))
    for source in (model.directory, tmp_path / "m.gguf"):
        pack_model(open_source(source), "f32", tmp_path / f"{source.name}.pack")
    one, other = (Pack.open(tmp_path / name) for name in ("model.pack", "m.gguf.pack"))
    assert len(one.mtp) == 4
    assert one.config.mtp_whole
    assert other.config.mtp_whole
    assert [block.shape for block in one.mtp] == [block.shape for block in other.mtp]
    for mine, theirs in zip(one.mtp, other.mtp, strict=True):
        for run in mine.shape.runs:
            np.testing.assert_array_equal(
                mine.read_units(run.name, 0, run.units), theirs.read_units(run.name, 0, run.units)
            )
        for name, values in mine.vectors().items():
            np.testing.assert_allclose(values, theirs.vectors()[name], atol=1e-6)


def test_a_layer_with_its_own_embedding_is_left_out(tmp_path: Path) -> None:
    model = mtp_delta.make_delta_mtp("qwen35", tmp_path / "model")
    file = model.directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mtp_use_dedicated_embeddings": True}))
    pack_model(open_source(model.directory), "q4", tmp_path / "pack")
    assert not Pack.open(tmp_path / "pack").mtp


def test_both_kinds_of_files_give_the_same_layer_of_exaone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the GGUF file as llama.cpp's converter does, in which the layer has the number after the last layer's."""
    model = mtp_apart.make_apart("exaonemoe", tmp_path / "model")
    weights, layers = load_file(model.directory / "model.safetensors"), model.reference.config.num_hidden_layers
    ends = zip(mtp_apart.LAYOUTS["exaonemoe"].own, ("eh_proj", "enorm", "hnorm", "shared_head_norm"), strict=True)
    own = {f"blk.{layers}.nextn.{end}.weight": weights[f"{name}.weight"].numpy() for name, end in ends}
    tensors, keys = gguf_entries._tensors, gguf_entries._keys

    def with_layer(*of: Any) -> dict[str, Any]:
        found = tensors(*of)
        block = {name: values for name, values in found.items() if name.startswith("blk.0.")}
        copied = {name.replace(".0.", f".{layers}.", 1): values * mtp_apart.SCALE for name, values in block.items()}
        return found | own | copied

    more = {"block_count": layers + 1, "nextn_predict_layers": 1}
    monkeypatch.setattr(gguf_entries, "_tensors", with_layer)
    monkeypatch.setattr(gguf_entries, "_keys", lambda *of: keys(*of) | more)
    gguf_entries.write_gguf(tmp_path / "m.gguf", model, "exaone-moe")
    for source in (model.directory, tmp_path / "m.gguf"):
        pack_model(open_source(source), "f32", tmp_path / f"{source.name}.pack")
    one, other = (Pack.open(tmp_path / name) for name in ("model.pack", "m.gguf.pack"))
    assert len(one.mtp) == 4
    assert one.manifest.mtp == other.manifest.mtp
    assert one.config.mtp_whole
    assert other.config.mtp_whole
    assert one_layer(one.config, 64).rope_kinds == one_layer(other.config, 64).rope_kinds == (0,)


def test_both_kinds_of_files_give_the_same_layer_of_nemotron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the GGUF file as llama.cpp's converter does, in which both blocks of the layer have one number."""
    model, tensors = mtp_apart.make_apart("nemotronhmoe", tmp_path / "model"), gguf_nemotron.tensors
    weights, config = load_file(model.directory / "model.safetensors"), model.reference.config
    blocks = len(config.layers_block_type)
    ends = zip(mtp_apart.LAYOUTS["nemotronhmoe"].own, ("eh_proj", "enorm", "hnorm", "shared_head_norm"), strict=True)
    own = {f"blk.{blocks}.nextn.{end}.weight": weights[f"{name}.weight"].numpy() for name, end in ends}

    def with_layer(one: TinyModel) -> dict[str, Any]:
        found, layer = tensors(one), dict[str, Any]()
        for number, norm in ((blocks - 2, "attn_norm"), (blocks - 1, "post_attention_norm")):
            for name, values in found.items():
                if name.startswith(f"blk.{number}."):
                    copied = name.replace(f".{number}.", f".{blocks}.", 1).replace("attn_norm", norm)
                    layer[copied] = values * (1 if "exp_probs_b" in name else mtp_apart.SCALE)
        return found | own | layer

    monkeypatch.setattr(gguf_nemotron, "tensors", with_layer)
    attention = [kind == "full_attention" for kind in config.layers_block_type]
    networks = [kind == "moe" for kind in config.layers_block_type]
    changes = {
        "block_count": blocks + 1,
        "nextn_predict_layers": 1,
        "attention.head_count_kv": [config.num_key_value_heads * each for each in (*attention, True)],
        "feed_forward_length": [config.moe_intermediate_size * each for each in (*networks, True)],
    }
    gguf_nemotron.write_gguf(
        tmp_path / "m.gguf", model, changes={f"nemotron_h_moe.{key}": value for key, value in changes.items()}
    )
    for source in (model.directory, tmp_path / "m.gguf"):
        pack_model(open_source(source), "f32", tmp_path / f"{source.name}.pack")
    one, other = (Pack.open(tmp_path / name) for name in ("model.pack", "m.gguf.pack"))
    assert len(one.mtp) == 4
    assert one.manifest.mtp == other.manifest.mtp
    assert one.config.mtp_whole
    assert other.config.mtp_whole


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("exaonemoe", {"mtp_layer_types": ["sliding_attention"]}),
        ("nemotronhmoe", {"mtp_layers_block_type": ["moe", "attention"]}),
        ("nemotronhmoe", {"mtp_layers_block_type": None, "mtp_hybrid_override_pattern": "*E*E"}),
    ],
)
def test_a_layer_of_another_form_is_left_out(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = mtp_apart.make_apart(family, tmp_path / "model")
    file = model.directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    pack_model(open_source(model.directory), "q4", tmp_path / "pack")
    assert not Pack.open(tmp_path / "pack").mtp

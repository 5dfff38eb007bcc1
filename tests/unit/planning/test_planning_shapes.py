"""A model's shape from its configuration equals the shape from its tensors, and no tensor is read for either."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from master.planning.problem import default_kv, ffn_parts, planning_case, planning_problem, request_of
from master.planning.shapes import model_shape, weight_bytes
from scheduler.model.machine import LAPTOP
from tests.support.models import TinyModel
from tests.support.paths import ROOT
from tpi.errors import ModelError, UsageError
from tpi.families.huggingface.configonly import from_config
from tpi.pack.reader import Pack
from tpi.sources.files import read_json
from worker.plan.segments import whole_blocks

FAMILIES = (
    "llama", "llama3", "mistral", "qwen2", "qwen3", "opt", "phi3", "gemma2", "gemma3", "smollm3", "granite", "gemma4",
    "olmo2", "exaone4",
)  # fmt: skip
PLENTY = 1 << 40
LARGE = ROOT / "tests/support/data/llama-3.1-70b"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["f32", "q8", "q4"])
def test_a_configuration_alone_says_what_the_tensors_say(
    name: str, dtype: str, tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    directory = tiny_model(name).directory
    shutil.copy(directory / "config.json", tmp_path)
    found, described = (model_shape(str(path), dtype, tmp_path, PLENTY) for path in (directory, tmp_path))
    assert (described.config, described.blocks) == (found.config, found.blocks)
    assert (described.head, described.embedding) == (found.head, found.embedding)


@pytest.mark.parametrize(("name", "tied"), [("gemma2", True), ("gemma3", True), ("opt", True), ("llama", False)])
def test_a_missing_tie_is_the_familys_default(name: str, tied: bool, tiny_model: Callable[[str], TinyModel]) -> None:
    fields = read_json(tiny_model(name).directory, "config.json")
    fields.pop("tie_word_embeddings", None)
    model, _ = from_config(fields, "somewhere")
    assert model.config.tied == (model.head is None) == tied


@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_a_pack_says_the_same(
    dtype: str, tiny_model: Callable[[str], TinyModel], tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    pack = tiny_pack("llama3", dtype)
    found = model_shape(str(pack.path), "auto", tmp_path, PLENTY)
    described = model_shape(str(tiny_model("llama3").directory), dtype, tmp_path, PLENTY)
    assert found.blocks == described.blocks
    assert weight_bytes(found) == weight_bytes(described)  # tied tables count once
    assert found.dtype == dtype


def test_what_is_described_cannot_be_read() -> None:
    model, source = from_config(read_json(LARGE, "config.json"), "somewhere")
    tensor = source.tensors[model.embedding.tensor]
    with pytest.raises(ModelError, match="cannot read"):
        source.read(tensor, (0, 1), (0, 1))


def test_auto_is_the_first_format_that_fits(tmp_path: Path) -> None:
    path = str(LARGE / "config.json")
    whole = weight_bytes(model_shape(path, "bf16", tmp_path, 0))
    assert [model_shape(path, "auto", tmp_path, room).dtype for room in (2 * whole, whole, whole // 3)] == [
        "auto", "q8", "q4",
    ]  # fmt: skip


def test_sizes_are_those_of_the_published_model(tmp_path: Path) -> None:
    """70.6 billion weights in bf16, https://huggingface.co/meta-llama/Llama-3.1-70B: 141.1 GB in 30 files."""
    shape = model_shape(str(LARGE / "config.json"), "bf16", tmp_path, 0)
    vectors = sum(2 * length for block in shape.blocks for _, length in block.vectors) + 2 * 8192
    assert weight_bytes(shape) + vectors == 2 * 70_553_706_496
    assert default_kv(shape) == "f16"
    assert default_kv(model_shape(str(LARGE / "config.json"), "f32", tmp_path, 0)) == "f32"


def test_segments_have_all_the_weights_however_they_are_cut(tmp_path: Path) -> None:
    shape = model_shape(str(LARGE / "config.json"), "q4", tmp_path, 0)
    case = planning_case(shape, LAPTOP, request_of(shape.config, None, None, 1, None))
    assert ffn_parts(case.plan.blocks) == 2  # 4 would be as large as attention, in 400 segments
    assert ffn_parts(case.plan.blocks[:8]) == 4
    whole, cut = (case.problem(pieces).work for pieces in (whole_blocks(case.plan), case.pieces))
    assert 2 * len(cut.segments) == 3 * len(whole.segments)
    assert (whole.nbytes, whole.kv_token, len(whole.blocks)) == (cut.nbytes, cut.kv_token, len(cut.blocks))
    assert sum(each.weights for each in whole.segments) == sum(each.weights for each in cut.segments)
    tables = 2 * 128256 * 8192
    assert sum(each.weights for each in whole.segments) + tables + 161 * 8192 == 70_553_706_496


def test_windows_are_their_layers(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    shape = model_shape(str(tiny_model("gemma2").directory), "q8", tmp_path, PLENTY)
    work = planning_problem(shape, LAPTOP, request_of(shape.config, None, None, 1, None), None, "f16").work
    assert [each.window for each in work.segments if each.kind == "attention"] == [12, 0]


def test_a_request_fits_into_the_context(tmp_path: Path) -> None:
    config = model_shape(str(LARGE / "config.json"), "q4", tmp_path, 0).config
    assert (request_of(config, None, None, 1, None).context, request_of(config, 1, 1, 1, 131072).context) == (
        4096,
        131072,
    )
    short = request_of(config, None, None, 4, 100)
    assert (short.prompt, short.answer, short.sequences) == (50, 25, 4)
    with pytest.raises(UsageError, match="do not fit into a context of 600"):
        request_of(config, 500, 101, 1, 600)
    with pytest.raises(UsageError, match="over the 131072"):
        request_of(config, None, None, 1, 131073)


def test_what_is_needed_beside_weights(tmp_path: Path) -> None:
    shape = model_shape(str(LARGE / "config.json"), "q4", tmp_path, 0)
    problem = planning_problem(shape, LAPTOP, request_of(shape.config, None, None, 1, None), None, None)
    assert problem.needs.token > 4 * 8192 * 5 + 4 * 2 * 28672  # activations, and what the FFN makes
    assert problem.needs.fixed > 4 * 8 * 128256 + 4 * 160 * 8192  # logits to sample from, and the norms
    assert problem.work.head.nbytes == 128256 * 8192 // 32 * 34


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"architectures": ["Abacus"]}, "Abacus is not supported"),
        ({"architectures": ["LlamaForCausalLM"], "hidden_size": "wide"}, "hidden_size"),
        ({"architectures": ["LlamaForCausalLM"], "quantization_config": {"bits": 4}}, "quantised in a way"),
    ],
)
def test_a_configuration_that_is_none_is_refused(fields: dict[str, object], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=sentence):
        model_shape(str(tmp_path / "config.json"), "q4", tmp_path, PLENTY)

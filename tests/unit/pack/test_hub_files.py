"""The files of a hub repository that are fetched: those of one model, and only files that are read."""

import json
from pathlib import Path

import pytest

from tpi.errors import ModelError
from tpi.pack.library.hubfiles import HubFiles, HubModel
from tpi.sources.safetensors import INDEX

SMALL = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
QUANTISED = [f"gguf/M-{name}.gguf" for name in ("F16", "Q2_K", "Q4_K_M", "Q4_K_S", "Q8_0", "UD-Q4_K_XL")]
SPLIT = [f"BF16/M-BF16-0000{number}-of-00002.gguf" for number in (1, 2)]


def choose(spec: str, *names: str) -> HubFiles:
    model = HubModel.parse(spec)
    assert model
    return HubFiles.choose(model, dict.fromkeys(names, 0))


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("o/m", ("o/m", "main", "")),
        ("o/m@v1.0", ("o/m", "v1.0", "")),
        ("o/m@refs/pr/1:Q4_K_M", ("o/m", "refs/pr/1", "Q4_K_M")),
        ("hf.co/o/m:Q8_0", ("o/m", "main", "Q8_0")),
        ("https://huggingface.co/o/m", ("o/m", "main", "")),
        ("o/m-GGUF:sub/m-Q8_0.gguf", ("o/m-GGUF", "main", "sub/m-Q8_0.gguf")),
    ],
)
def test_ids_of_the_hub(spec: str, parts: tuple[str, str, str]) -> None:
    model = HubModel.parse(spec)
    assert model
    assert (model.repository, model.revision, model.choice) == parts


@pytest.mark.parametrize(
    "spec", ["m", "a/b/c", "/o/m", "o/m:", "o/m@", "models/x.gguf", "dir/model.safetensors", "o/m x"]
)
def test_what_is_no_id_of_the_hub(spec: str) -> None:
    assert HubModel.parse(spec) is None


def test_only_what_is_read_is_wanted() -> None:
    extra = ["README.md", "pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth",
             "onnx/model.onnx", "onnx/config.json", "model.q8.safetensors", "training_args.json"]  # fmt: skip
    templates = ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    files = choose("o/m", *SMALL, "model.safetensors", *extra, *templates)
    assert set(files.wanted(Path("none"), weights=True)) == {*SMALL, *templates, "model.safetensors"}
    assert set(files.wanted(Path("none"), weights=False)) == {*SMALL, *templates}


def test_shards_are_those_that_the_index_names(tmp_path: Path) -> None:
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    files = choose("o/m", *SMALL, INDEX, *shards, "model-00001-of-00009.safetensors", "model.safetensors")
    assert files.wanted(tmp_path, weights=True) == [*SMALL, INDEX]  # first of all
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shards[0], "b": shards[1], "c": shards[0]}}))
    assert files.wanted(tmp_path, weights=True) == [*SMALL, INDEX, *shards]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "../other"}}))
    with pytest.raises(ModelError, match=r"names '../other', which the repository does not have"):
        files.wanted(tmp_path, weights=True)


@pytest.mark.parametrize(
    ("spec", "chosen"),
    [
        ("o/m", "gguf/M-Q4_K_M.gguf"),
        ("o/m:q8_0", "gguf/M-Q8_0.gguf"),
        ("o/m:UD-Q4_K_XL", "gguf/M-UD-Q4_K_XL.gguf"),
        ("o/m:M-Q2_K", "gguf/M-Q2_K.gguf"),
        ("o/m:M-Q2_K.gguf", "gguf/M-Q2_K.gguf"),
        ("o/m:gguf/M-F16.gguf", "gguf/M-F16.gguf"),
        ("o/m:BF16", SPLIT[0]),
        (f"o/m:{SPLIT[1]}", SPLIT[0]),
        (f"o/m:{SPLIT[1].rpartition('/')[2]}", SPLIT[0]),
    ],
)
def test_one_of_several_gguf_models(spec: str, chosen: str) -> None:
    files = choose(spec, "config.json", "README.md", "gguf/mmproj-F16.gguf", "imatrix.gguf", *QUANTISED, *SPLIT)
    assert files.gguf == (tuple(SPLIT) if chosen == SPLIT[0] else (chosen,))
    assert ("Q4_K_M.gguf, one of 7" in files.note) == (spec == "o/m")


def test_a_directory_may_name_the_quantisation() -> None:
    parts = [f"{name}/M-0000{part}-of-00002.gguf" for name in ("Q2_K", "Q4_K_M") for part in (1, 2)]
    assert choose("o/m:q4_k_m", *parts).gguf == tuple(parts[2:])


def test_the_only_gguf_model_needs_no_note() -> None:
    assert not choose("o/m", "a-mmproj-Q8_0.gguf", "a-imatrix.gguf", "a.gguf").note
    assert choose("o/m", "model.IQ3_M.gguf", "mmproj.gguf") == HubFiles(
        frozenset({"model.IQ3_M.gguf", "mmproj.gguf"}), ("model.IQ3_M.gguf",)
    )
    assert choose("o/m", "b.IQ3_M.gguf", "a.IQ2_M.gguf").gguf == ("a.IQ2_M.gguf",)


def test_safetensors_are_taken_unless_a_gguf_model_is_named() -> None:
    names = ("config.json", "tokenizer.json", "model.safetensors", *QUANTISED)
    assert choose("o/m", *names).gguf == ()
    assert choose("o/m:Q8_0", *names).gguf == ("gguf/M-Q8_0.gguf",)


@pytest.mark.parametrize(
    ("spec", "names", "words"),
    [
        ("o/m:Q3_K_M", QUANTISED, r"no GGUF model 'Q3_K_M'; name one of its files: .*Q2_K.gguf"),
        ("o/m:4_K_M", QUANTISED, r"no GGUF model '4_K_M'"),
        ("o/m:Q8_0", ["a-Q8_0.gguf", "b-Q8_0.gguf"], r"2 GGUF models 'Q8_0'; name one of its files: a-Q8_0.gguf, b-Q8"),
        ("o/m:Q8_0", ["config.json", "model.safetensors"], r"no GGUF files; leave out :Q8_0"),
        ("o/m", ["config.json", "pytorch_model.bin"], r"only pytorch_model.bin, a pickle"),
        ("o/m", ["README.md", "consolidated.safetensors"], r"has no model.safetensors, .* or GGUF files"),
        ("o/m", ["model.safetensors"], r"has weights and no config.json"),
        ("o/m", SPLIT[:1], r"lacks BF16/M-BF16-00002-of-00002.gguf, one of the 2 files"),
        ("o/m", [], r"has no model.safetensors"),
    ],
)
def test_what_is_no_model_is_refused(spec: str, names: list[str], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        choose(spec, *names)


def test_paths_out_of_the_repository_are_passed_over() -> None:
    names = ("../x.jinja", "/x.jinja", "a/../../x.jinja", "..\\x.jinja", "x\n.jinja", "sub/x.jinja")
    files = choose("o/m", "config.json", "model.safetensors", *names)
    assert files.wanted(Path("none"), weights=True) == ["config.json", "model.safetensors"]

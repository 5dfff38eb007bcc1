"""`--dtype auto` uses the best format that fits."""

import json
from pathlib import Path

import pytest

from master.deployment.dtype import choose_dtype
from tpi.pack.library.locate import Located

VALUES = 1_000_000


@pytest.fixture
def source(tmp_path: Path) -> Located:
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32"}))
    (tmp_path / "model.safetensors").write_bytes(bytes(4 * VALUES))
    return Located("directory", tmp_path, "tiny")


@pytest.mark.parametrize(
    ("memory", "expected"), [(5e6, "auto"), (2.5e6, "bf16"), (1.3e6, "q8"), (1.1e6, "q4"), (1e5, "q4")]
)
def test_the_best_that_fits(memory: float, expected: str, source: Located) -> None:
    assert choose_dtype("auto", source, [int(memory)], [1]) == expected
    assert choose_dtype("auto", source, [int(memory / 2)] * 2, [1, 1]) == expected


def test_float16_is_packed_in_16_bits(source: Located) -> None:
    (source.path / "config.json").write_text(json.dumps({"dtype": "float16"}))
    (source.path / "model.safetensors").write_bytes(bytes(2 * VALUES))
    assert choose_dtype("auto", source, [int(2.5e6)], [1]) == "auto"
    assert choose_dtype("auto", source, [int(1.3e6)], [1]) == "q8"


def test_fp8_becomes_q8(source: Located) -> None:
    fields = {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (source.path / "config.json").write_text(json.dumps(fields))
    (source.path / "model.safetensors").write_bytes(bytes(VALUES))
    assert choose_dtype("auto", source, [int(1.3e6)], [1]) == "auto"
    assert choose_dtype("auto", source, [int(1.1e6)], [1]) == "q4"


def test_the_tightest_node_counts_and_a_shareless_one_does_not(source: Located) -> None:
    assert choose_dtype("auto", source, [10**9, 10**6], [1, 1]) == "q8"
    assert choose_dtype("auto", source, [10**9, 10**6], [1, 0]) == "auto"


def test_what_was_asked_for_is_taken(source: Located) -> None:
    assert choose_dtype("q4s", source, [1], [1]) == "q4s"
    assert choose_dtype("auto", Located("gguf", source.path, "x"), [1], [1]) == "auto"

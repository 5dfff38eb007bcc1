"""Predictions for models that are too large to create: a plan without weights equals the plan with them."""

from pathlib import Path

import pytest

from benchmarks.memory.papers import DEVICES, MODELS, WINDOWS, bench, predicted
from benchmarks.memory.unwritten import UnwrittenPack
from tests.support.weights.shapes import LLAMA_1B, write_huggingface
from tpi.pack.library.locate import open_model

SMALL: dict[str, object] = LLAMA_1B | {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 20_000,
}  # fmt: skip


@pytest.mark.parametrize("window", [0, *WINDOWS])
def test_a_pack_that_is_not_written_is_planned_like_one_that_is(tmp_path: Path, window: int) -> None:
    real = open_model(str(write_huggingface(tmp_path / "small", SMALL)), "f32", tmp_path)
    unwritten = UnwrittenPack(SMALL, "f32")
    assert [predicted(real, devices, window) for devices in (2, 3)] == [
        predicted(unwritten, devices, window) for devices in (2, 3)
    ]


def test_the_papers_tables_have_every_model_and_device_count() -> None:
    overview, *by_devices = bench(True).tables
    assert [row["model"] for row in overview.rows] == [MODELS[0].name]
    assert [len(table.rows) for table in by_devices] == [len(DEVICES)] * len(WINDOWS)
    assert all(len(model.without) == len(DEVICES) == len(one) for model in MODELS for one in model.windows)

"""Layers of one block and of three blocks are packed, split, streamed and computed like layers of two."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from master.generation.engine import Engine
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.cluster.inprocess import in_process_engine
from tests.support.cluster.single import Setting, single_node
from tests.support.generating import generate
from tests.support.models import TinyModel
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack


@pytest.fixture
def uneven(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> Pack:
    """Return a pack of two layers: attention and two feed-forward blocks, and attention alone."""
    opened = open_source(tiny_model("llama").directory)
    (attention, ffn), (second, other) = opened.model.layers
    model = replace(opened.model, layers=((attention, ffn, other), (second,)))
    pack_model(replace(opened, model=model), "f32", tmp_path / "pack")
    return Pack.open(tmp_path / "pack")


def tokens(engine: Engine) -> list[int]:
    sequence = engine.admit([5, 6, 7, 8])
    made = [one.token for one in generate(engine, sequence, Sampler(Sampling(temperature=0)), 8)]
    engine.release(sequence)
    return made


def test_layers_of_any_number_of_blocks_are_split_and_streamed(uneven: Pack, tmp_path: Path) -> None:
    assert [[block.kind for block in layer] for layer in uneven.layers] == [["attention", "ffn", "ffn"], ["attention"]]
    with single_node(uneven, Setting(), cache=tmp_path) as (engine, _):
        expected = tokens(engine)
    assert len(set(expected)) > 1
    with single_node(uneven, Setting(window=1, retain=2), cache=tmp_path) as (engine, node):
        assert node.window.placement.resident == {2}  # the second of the two FFN blocks
        assert tokens(engine) == expected
        steady = node.steady()
        assert steady is not None
        blocks = 2 * (steady.attention_s + steady.ffn_s)
        assert steady.busy_s == pytest.approx(blocks + 4 * steady.allreduce_s)
    with in_process_engine(uneven, [2, 1], tmp_path / "shards") as engine:
        assert tokens(engine) == expected

"""Stages: nodes that hold different layers give the tokens, and the bits, of one node that holds them all."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from master.generation.engine import Engine
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.generating import generate
from tpi.pack.reader import Pack

PROMPT = list(range(7, 40))
LENGTH = 12


def greedy(pack: Pack, shares: list[float], cache: Path, stages: str = "1", chunk: int = 16) -> list[int]:
    """The tokens of a greedy answer."""
    with closing(in_process_deployment(pack, shares, cache, chunk, stages=stages)) as deployment:
        engine = Engine(deployment)
        sequence = engine.admit(PROMPT)
        return [each.token for each in generate(engine, sequence, Sampler(Sampling(temperature=0)), LENGTH)]


@pytest.mark.parametrize(
    ("shares", "stages"),
    [
        ([1, 1], "2"),
        ([1, 1, 1], "0:n0,1:n1+n2"),
        ([1, 1, 2], "0:n0+n2,1:n1"),
        ([1, 1], "0:n1,1:n0"),
        ([0, 1, 1], "2"),
        ([1, 1, 1], "0:n2,1:n1"),
    ],
)
def test_stages_give_the_tokens_of_one_node(
    shares: list[float], stages: str, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    pack = tiny_pack("llama")
    assert greedy(pack, shares, tmp_path, stages) == greedy(pack, [1], tmp_path / "one")

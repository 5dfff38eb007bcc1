"""The values of `--stages`, and the layers and nodes that they mean."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from master.deployment.stages import in_rank_order, lay_out, stages_in
from tpi.errors import PlanError, UsageError

NAMES = ["master", "desk", "attic", "10.0.0.7:9990"]


def laid_out(asked: str, shares: list[float], layers: int = 22) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(one.first, one.last, one.ranks) for one in lay_out(asked, NAMES, range(layers + 1), shares)]


@pytest.mark.parametrize(
    ("asked", "shares", "stages"),
    [
        ("1", [1, 0, 1, 1], [(0, 22, (0, 1, 2, 3))]),
        ("2", [1, 1, 1, 1], [(0, 11, (0, 1)), (11, 22, (2, 3))]),
        ("2", [0, 1, 1, 2], [(0, 11, (1, 2)), (11, 22, (3,))]),
        ("4", [8, 1, 1, 1], [(0, 16, (0,)), (16, 18, (1,)), (18, 20, (2,)), (20, 22, (3,))]),
        ("0-9:attic, 10-21:master+desk", [1, 1, 1, 1], [(0, 10, (2,)), (10, 22, (0, 1))]),
        ("0-4:attic,5-9:desk,10-21:attic", [1, 1, 1, 1], [(0, 5, (2,)), (5, 10, (1,)), (10, 22, (2,))]),
        ("0:10.0.0.7:9990,1-21:desk", [1, 1, 1, 1], [(0, 1, (3,)), (1, 22, (1,))]),
    ],
)
def test_stages_are_laid_out(asked: str, shares: list[float], stages: list[tuple[int, int, tuple[int, ...]]]) -> None:
    assert laid_out(asked, shares) == stages


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("0", "give at least 1"),
        ("33", "asks for 33 stages; give at most 32"),
        (",".join(f"{layer}:desk" for layer in range(33)), "asks for 33 stages; give at most 32"),
        ("5", "at most 3, the number of nodes with a share above 0"),
        ("-1", "neither auto nor a number of stages nor layers"),
        ("", "neither auto nor a number of stages nor layers"),
        ("0-9:", "neither auto nor a number of stages nor layers"),
        ("0-9:cellar,10-21:desk", "the node 'cellar', but the nodes are master, desk, attic"),
        ("0-9:master,11-21:desk", "the layers 0 to 21 in order, each once"),
        ("0-9:master,9-21:desk", "the layers 0 to 21 in order, each once"),
        ("0-9:master,10-30:desk", "the layers 0 to 21 in order, each once"),
        ("10-21:master,0-9:desk", "the layers 0 to 21 in order, each once"),
        ("5-3:master,4-21:desk", "the layers 0 to 21 in order, each once"),
        ("0-9:master,10-21:desk+master", "names master twice"),
        ("0-9:desk+desk,10-21:master", "names desk twice"),
        ("0-4:desk,5-9:master+desk,10-21:master", "names desk, master twice; a node of several stages must be alone"),
        ("0-4:desk,5-9:desk,10-21:master", "gives desk two stages in a row"),
        ("0-9:master,10-21:attic", "attic, whose share is 0"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_by_name(asked: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        laid_out(asked, [1, 1, 0, 1])


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="cut into at most 2 stages, too few for 3"):
        laid_out("3", [1, 1, 1, 1], layers=2)


@given(
    st.lists(st.just(0.0) | st.floats(0.01, 9), min_size=1, max_size=12).filter(any),
    st.integers(1, 40),
    st.integers(12, 99),
)
def test_stages_in_rank_order_hold_every_layer_once_and_every_node_with_a_share(
    shares: list[float], count: int, layers: int
) -> None:
    stages = in_rank_order(count, range(layers + 1), shares)
    holders = [rank for rank, share in enumerate(shares) if share > 0]
    assert [rank for stage in stages for rank in stage.ranks] == holders
    assert len(stages) == min(count, len(holders))
    ends = [0, *(stage.last for stage in stages)]
    assert [stage.first for stage in stages] == ends[:-1]
    assert ends[-1] == layers
    assert all(stage.last > stage.first for stage in stages)


def test_the_number_of_stages_is_read_from_numbers_and_layouts() -> None:
    assert [stages_in("3"), stages_in("0-4:master,5-9:desk")] == [3, 2]

"""A worker checks each number of a plan with experts against the others, and refuses a plan that contradicts itself."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from master.deployment.assignments import assignments
from master.deployment.stages import one_stage
from tests.support.altered import OPTIONS, PEERS, changed, leaves, put
from tests.support.models import MIXTURES
from tpi.errors import MessageError, PlanError
from tpi.net.codec import decode, encode
from tpi.net.messages import Assign
from tpi.pack.reader import Pack
from worker.plan.checks import check_assign


@pytest.fixture(scope="module")
def good(tiny_pack: Callable[..., Pack]) -> Assign:
    pack = tiny_pack("qwen2moe")
    return assignments(pack, one_stage(pack, [1, 1, 1]), PEERS, OPTIONS, 1, 1)[1]


def experts_block(assign: Assign) -> int:
    return next(number for number, block in enumerate(assign.blocks) if block.kind == "experts")


def test_the_plan_itself_is_taken_as_it_comes_over_the_wire(good: Assign) -> None:
    there = decode([bytes(frame) for frame in encode(good)])
    assert there == good
    check_assign(there)
    assert len(good.blocks[experts_block(good)].runs) == 6  # the shared one, and a slice of each of five


@pytest.mark.parametrize("family", MIXTURES)
def test_plans_of_all_families_are_taken(family: str, tiny_pack: Callable[..., Pack]) -> None:
    pack = tiny_pack(family)
    for assign in assignments(pack, one_stage(pack, [3, 2, 1]), PEERS, OPTIONS, 1, 1)[1:]:
        check_assign(decode([bytes(frame) for frame in encode(assign)]))


def test_a_plan_in_mxfp4_is_taken(good: Assign) -> None:
    number, layout = next((at, one) for at, one in enumerate(good.layouts) if one.name == "neuron")
    parts = tuple(replace(part, format="mxfp4") for part in layout.parts)
    coded = changed(good, ("layouts", number), replace(layout, layout="tiled", parts=parts))
    check_assign(decode([bytes(frame) for frame in encode(coded)]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda block: replace(block, runs=block.runs[::-1]), "follow|has the runs"),
        (lambda block: replace(block, runs=(*block.runs, block.runs[0])), "has the runs"),
        (lambda block: replace(block, runs=(block.runs[0], *block.runs[:0:-1])), "follow"),
        (lambda block: replace(block, runs=(*block.runs, block.runs[-1])), "follow"),
        (lambda block: replace(block, runs=block.runs[:1]), "has the runs"),
        (lambda block: replace(block, vectors=block.vectors[:1]), "vectors of a block are"),
        (lambda block: replace(block, vectors=tuple(replace(one, length=9) for one in block.vectors)), "has 9 values"),
    ],
)  # fmt: skip
def test_a_block_of_experts_that_is_another_is_refused(good: Assign, change: Callable[[Any], Any], words: str) -> None:
    number = experts_block(good)
    with pytest.raises(PlanError, match=words):
        check_assign(changed(good, ("blocks", number), change(good.blocks[number])))


@pytest.mark.parametrize(
    ("field", "value"),
    [("experts", 4), ("experts", 0), ("used", 6), ("used", 0), ("width", 1), ("shared", 0), ("groups", 2),
     ("groups_used", 0), ("group_best", 9), ("scale", float("inf"))],
)  # fmt: skip
def test_settings_that_do_not_fit_the_blocks_are_refused(good: Assign, field: str, value: float) -> None:
    with pytest.raises(PlanError):
        check_assign(changed(good, ("config", "mixture", field), value))


def test_experts_without_settings_are_refused(good: Assign) -> None:
    with pytest.raises(PlanError):
        check_assign(changed(good, ("config", "mixture"), None))


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_any_field_of_a_plan_is_good_or_refused(good: Assign, data: st.DataObject) -> None:
    head, *raw = (bytes(frame) for frame in encode(good))
    header = msgpack.unpackb(head)
    path = data.draw(st.sampled_from([path for path in leaves(header) if path[0] > 1]))
    ints = st.one_of(st.integers(-(2**63), 2**64 - 1), st.integers(-3, 300), st.sampled_from([2**31 - 1, 2**32]))
    new = data.draw(st.one_of(ints, st.floats(), st.booleans(), st.none(), st.text(max_size=9), st.binary(max_size=33)))
    with suppress(PlanError, MessageError):
        check_assign(decode([msgpack.packb(put(header, path, new)), *raw]))

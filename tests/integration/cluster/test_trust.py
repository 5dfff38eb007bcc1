"""A worker checks each request of its master. It refuses a plan or a step beyond its limits, and goes on serving."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from master.deployment.assignments import assignments
from master.deployment.stages import one_stage
from master.workers.cluster import Cluster
from master.workers.weights import PackSource
from tests.support.altered import OPTIONS, PEERS, Where, changed, leaves, put
from tests.support.cluster.cluster_helpers import real_worker
from tests.support.models import MODELS
from tpi.errors import MessageError, NodeError, PlanError
from tpi.net.codec import decode, encode
from tpi.net.fields import Profile
from tpi.net.messages import Assign, NodeOptions, Step, StepEntry
from tpi.pack.reader import Pack
from worker.node.pages import PageTables
from worker.plan.checks import check_assign, check_step
from worker.profile import limit_options

LENT = 64 << 20

HUGE = 2**31 - 1
OUT_OF_RANGE: list[tuple[Where, Any]] = [
    *[(("config", name), value) for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate")
      for value in (0, -1, 7, 2**62)],
    *[(("config", name), value) for name in ("vocab", "context") for value in (0, -5, 2**62)],
    *[(("config", name), value) for name in ("attention_scale", "norm_eps", "rope_scale", "embed_scale",
      "attention_softcap", "logit_softcap") for value in (math.inf, -math.inf)],
    (("config", "norm_eps"), -1.0), (("config", "attention_softcap"), -1.0), (("config", "position_offset"), -2),
    (("config", "inv_freq"), (1.0,) * 1000), (("config", "inv_freq"), (math.inf,)),
    (("config", "windows"), (1,)), (("config", "windows"), (-1, 1)), (("config", "gated"), False),
    *[(("options", name), value) for name in ("context", "pages", "prefill_tokens") for value in (0, HUGE)],
    (("options", "timeout_s"), 0.0), (("options", "timeout_s"), 1e12),
    (("rank",), 0), (("size",), 2), (("size",), HUGE), (("collective",), "gossip"), (("wire",), "f8"),
    (("peers",), ()), (("peers",), PEERS[:2]), (("peers",), PEERS[::-1]), (("peers", 1, "address"), ""),
    (("layers",), ()), (("layers", 0, "blocks"), (1, 0)), (("layers", 1, "blocks"), (2,)),
    (("layers", 0, "blocks"), ()), (("layers", 0, "blocks"), (0, 1, 0)), (("layers", 0, "blocks"), (0, *[1] * 16)),
    (("layers", 0, "blocks"), (0, 3)), (("layers", 0, "number"), 1), (("stages", 0, "ranks"), (0,)),
    (("stages", 0, "ranks"), (2, 1, 0)), (("stages", 0, "ranks"), (0, 1, 1, 2)), (("stages", 0, "ranks"), ()),
    (("stages", 0, "first"), 1), (("stages", 0, "last"), 1), (("stages",), ()),
    (("blocks", 0, "kind"), "ffn"), (("blocks", 1, "kind"), "table"), (("blocks", 0, "runs"), ()),
    (("blocks", 0, "vectors"), ()), (("blocks", 0, "vectors", 0, "length"), 1),
    (("blocks", 0, "vectors", 0, "name"), "x"),
    *[(("layouts", number, name), value) for number in range(3) for name in ("width", "units", "hidden")
      for value in (0, 1, 7, HUGE)],
    *[(("layouts", number, "parts"), ()) for number in range(3)],
    *[(("layouts", number, "parts", 0, "axis"), "column") for number in range(3)],
    (("layouts", 0, "name"), "kv"), (("layouts", 2, "name"), "row"),
]  # fmt: skip


@pytest.fixture(scope="module")
def good(tiny_pack: Callable[..., Pack]) -> Assign:
    pack = tiny_pack("llama")
    plans = assignments(pack, one_stage(pack, [1, 1, 1]), PEERS, OPTIONS, 1, 1)
    return plans[1]


def test_a_plan_of_this_version_is_taken(tiny_pack: Callable[..., Pack], good: Assign) -> None:
    check_assign(good)
    for family in MODELS:
        for dtype in ("f32", "q4") if family == "llama3" else ("f32",):
            pack = tiny_pack(family, dtype)
            stages = one_stage(pack, [0, 1, 1])
            for one in assignments(pack, stages, PEERS, OPTIONS, 1, 1, collective="auto")[1:]:
                check_assign(one)


@pytest.mark.parametrize("blocks", [((0, 1, 3), (2,)), ((0,), (2, 1, 1, 3)), ((0, 1, 1), (2, 3)), ((1, 3), (0,), (2,))])
def test_layers_may_have_any_number_of_blocks(good: Assign, blocks: tuple[tuple[int, ...], ...]) -> None:
    layers = tuple(replace(good.layers[0], number=number, blocks=some) for number, some in enumerate(blocks))
    stages = (replace(good.stages[0], last=len(blocks)),)
    check_assign(replace(good, layers=layers, stages=stages, config=replace(good.config, layers=len(blocks))))


@pytest.mark.parametrize(("path", "value"), OUT_OF_RANGE, ids=lambda part: str(part)[:40])
def test_a_plan_with_one_field_out_of_range_is_refused(good: Assign, path: Where, value: Any) -> None:
    with pytest.raises((PlanError, MessageError)):
        check_assign(decode([bytes(frame) for frame in encode(changed(good, path, value))]))


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_any_field_of_a_plan_is_good_or_refused(good: Assign, data: st.DataObject) -> None:
    """Whatever value a field has on the wire, the plan is accepted or refused with a typed error."""
    head, *raw = (bytes(frame) for frame in encode(good))
    header = msgpack.unpackb(head)
    path = data.draw(st.sampled_from([path for path in leaves(header) if path[0] > 1]))
    ints = st.one_of(st.integers(-(2**63), 2**64 - 1), st.integers(-3, 300), st.sampled_from([2**31 - 1, 2**32]))
    new = data.draw(st.one_of(ints, st.floats(), st.booleans(), st.none(), st.text(max_size=9), st.binary(max_size=33)))
    with suppress(PlanError, MessageError):
        check_assign(decode([msgpack.packb(put(header, path, new)), *raw]))


@pytest.mark.parametrize(
    ("tokens", "width", "counts"), [(17, 96, (17,)), (2, 95, (2,)), (2, 96, (2, 0)), (16, 96, (1,) * 16 + (0,))]
)
def test_a_step_beyond_the_plan_is_refused(tokens: int, width: int, counts: tuple[int, ...]) -> None:
    entries = tuple(StepEntry(number, 0, count, 0, (number,)) for number, count in enumerate(counts))
    with pytest.raises(PlanError, match="a step"):
        check_step(Step(1, 1, 1, entries, (), np.zeros((tokens, width), np.float32)), 96, 16, True)


def test_tables_are_bounded_by_the_blocks_that_a_node_has() -> None:
    with pytest.raises(MessageError, match="more than the 4 pages"):
        PageTables(4, 32).batch([StepEntry(1, 0, 1, 0, (0, 1, 2, 3, 0))])
    tables = PageTables(4, 32)
    tables.batch([StepEntry(number, 0, 1, 0, (number,)) for number in range(4)])
    with pytest.raises(MessageError, match="more than the 4 pages"):
        tables.batch([StepEntry(9, 0, 1, 0, (0,))])


def laptop(limit: int) -> Profile:
    return Profile("h", "Linux", 4, 4, 1 << 40, 1 << 39, limit, 1 << 20, 1 << 40)


def test_no_scheduler_does_not_lift_what_the_lender_allows(good: Assign) -> None:
    asked = replace(OPTIONS, scheduler="resident", threads=2)
    check_assign(replace(good, options=limit_options(asked, laptop(1 << 30))))
    assert limit_options(asked, laptop(0)).memory == 0
    least = next(size for size in range(1 << 20, LENT, 1 << 18) if taken(good, replace(OPTIONS, threads=2), size))
    assert not taken(good, asked, least)
    with pytest.raises(PlanError, match="all that this node may use"):
        check_assign(replace(good, options=limit_options(asked, laptop(least))))


def taken(assign: Assign, asked: NodeOptions, limit: int) -> bool:
    try:
        check_assign(replace(assign, options=limit_options(asked, laptop(limit))))
    except PlanError:
        return False
    return True


def test_a_real_worker_refuses_by_name_and_serves_on(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    """A master cannot exceed the worker's `--memory`, or the limits of a step, of waiting steps, and of a plan."""
    pack = tiny_pack("llama")

    def planned(cluster: Cluster, epoch: int, **options: Any) -> Assign:
        stages = one_stage(pack, [0, 1])
        chosen = replace(OPTIONS, **options)
        return assignments(pack, stages, cluster.peers(), chosen, cluster.session, epoch, "star")[1]

    def refused(match: str, change: Callable[[Assign], Assign] = lambda assign: assign, **options: Any) -> None:
        with Cluster.connect([address]) as cluster, pytest.raises(NodeError, match=match):
            cluster.assign([change(planned(cluster, 1, **options))], PackSource(pack))

    def fails(match: str, *steps: Callable[[Cluster], Step]) -> None:
        with Cluster.connect([address]) as cluster:
            cluster.assign([planned(cluster, 1)], PackSource(pack))
            with pytest.raises(NodeError, match=match):
                run_all(cluster, [each(cluster) for each in steps])

    with real_worker(tmp_path, "--memory", "64MiB") as (process, address):
        refused(r"64MiB of memory is too little", pages=1 << 22, context=1 << 24)
        refused(r"64MiB of memory is too little", pages=1 << 22, context=1 << 24, scheduler="resident")
        refused(r"heads is 0", lambda assign: changed(assign, ("config", "heads"), 0))
        refused(
            r"shared out unlike|lacks KV heads", lambda assign: changed(assign, ("blocks", 0, "runs", 1), empty(assign))
        )
        fails(r"a step has 17 tokens", lambda cluster: long_step(cluster, 1, 17))
        fails(r"\d+ tokens are queued", *[lambda cluster, n=n: long_step(cluster, n, 16) for n in range(1, 99)])
        with Cluster.connect([address]) as cluster:
            assert cluster.assign([planned(cluster, 1)], PackSource(pack))
        assert process.poll() is None


def run_all(cluster: Cluster, steps: Sequence[Step]) -> None:
    for each in steps:
        cluster.step(each)
    cluster.stats()


def empty(assign: Assign) -> Any:
    return replace(assign.blocks[0].runs[1], first=0, last=0, hashes=b"")


def long_step(cluster: Cluster, number: int, tokens: int) -> Step:
    entry = StepEntry(number, 0, tokens, 0, (0,))
    return Step(cluster.session, 1, number, (entry,), (), np.zeros((tokens, 96), np.float32))

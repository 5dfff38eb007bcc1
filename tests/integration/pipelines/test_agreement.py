"""The values that nodes agree on before a batch: the least room decides, options are kept, and figures are sent."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from master.deployment.assignments import assignments
from master.deployment.batching import batched, fastest
from master.deployment.stages import one_stage
from master.options import RunOptions
from master.session import Session
from scheduler.model.machine import LAPTOP, NodeMachine, Rates, emulated_node, laptop_gpu
from scheduler.model.nodefigures import card_figures, machine_from_message
from tests.support.devices.offloading import answers, prompts
from tpi.devices.emulated.machine import parse_emulated
from tpi.devices.options import DeviceOptions, OffloadOptions
from tpi.errors import PlanError
from tpi.net.fields import Card, GroupBatch, MachineSpeed
from tpi.net.messages import Assign, NodeOptions, PeerAddress
from tpi.pack.reader import Pack
from worker.node_plan import node_plan
from worker.pipelines.accelerated import BatchAccelerated
from worker.pipelines.agree import GroupMember, agree

BATCH = OffloadOptions(pipeline="batch")
LITTLE, MUCH = 3 << 20, 64 << 20


def plans(pack: Pack, shares: tuple[float, ...]) -> list[Assign]:
    peers = [PeerAddress(rank, f"node {rank}", "") for rank in range(len(shares))]
    options = NodeOptions(128, 64 * 4, "f32", 512, memory=1 << 30)
    return assignments(
        pack,
        one_stage(pack, shares),
        peers,
        options,
        session=1,
        epoch=1,
    )


def members(pack: Pack, *machines: NodeMachine, options: OffloadOptions = BATCH) -> list[GroupMember]:
    made = plans(pack, (1.0,) * len(machines))
    pairs = enumerate(zip(made, machines, strict=True))
    return [GroupMember(f"node {rank}", node_plan(plan), machine, options) for rank, (plan, machine) in pairs]


def with_card(room: int) -> NodeMachine:
    return replace(LAPTOP, accelerator=replace(laptop_gpu(), memory=room))


def test_the_node_with_the_least_room_bounds_what_all_have_alike(tiny_pack: Callable[..., Pack]) -> None:
    pack = tiny_pack("mixtral")
    large, small, both = (
        agree(members(pack, *map(with_card, rooms))) for rooms in ((MUCH, MUCH), (LITTLE, LITTLE), (MUCH, LITTLE))
    )
    assert both.chunk == small.chunk < large.chunk
    assert (both.batch, both.micro_batches) == (small.batch, small.micro_batches) != (large.batch, large.micro_batches)


def test_what_a_node_cannot_do_is_refused_by_its_name(tiny_pack: Callable[..., Pack]) -> None:
    pack = tiny_pack("llama")
    one, two = members(pack, with_card(MUCH), with_card(MUCH))
    for other, said in [
        (replace(two, options=OffloadOptions(pipeline="memory")), "node 1 uses --pipeline memory"),
        (replace(two, machine=replace(two.machine, more=(laptop_gpu(),))), "node 1: .* on one accelerator"),
        (replace(two, machine=with_card(1 << 16)), "node 1: .* cannot hold the model and one sequence"),
        (
            replace(two, options=OffloadOptions(crossover=7)),
            "node 1: --crossover has no effect with --pipeline batch.*; leave out one of the two",
        ),
        (_windowed(two), "node 1: --window has no effect with --pipeline batch"),
    ]:
        with pytest.raises(PlanError, match=said) as refused:
            agree([one, other])
        assert refused.value.node == "node 1"  # it is left out, if it was found


@pytest.mark.parametrize(
    ("asked", "told", "host", "batches"),
    [
        ("batch", "batch", 1e12, True), ("auto", "auto", 1e8, True), ("auto", "auto", 1e12, False),
        ("auto", "performance", 1e8, False), ("performance", "auto", 1e8, False),
    ],
)  # fmt: skip
def test_a_group_batches_on_request_or_where_that_pays(
    asked: str, told: str, host: float, batches: bool, tiny_pack: Callable[..., Pack]
) -> None:
    pack = tiny_pack("llama")
    machine = replace(with_card(MUCH), host=Rates(host, host))
    quick = replace(machine, accelerator=replace(laptop_gpu(), memory=MUCH, rates=Rates(3e11, 2e13)))
    made, both = plans(pack, (1, 1)), members(pack, quick, quick, options=OffloadOptions(pipeline=told))  # type: ignore[arg-type]
    wish = OffloadOptions(pipeline=asked, unattended=True)  # type: ignore[arg-type]
    found = batched(made, both, wish)
    assert [plan.options.batch is not None for plan in found] == [batches] * 2
    assert batches or found == made
    assert batched(made, both, replace(wish, unattended=False))[0].options.batch is None or asked == "batch"
    sparse = [_sparse(member) for member in both]
    if told != "batch":
        assert batched(made, sparse, wish) == made
        return
    with pytest.raises(PlanError, match="nodes that compute only active neurons cannot batch; add --sparsity off"):
        batched(made, sparse, wish)


def test_a_reason_against_batches_is_not_overridden_by_auto(
    tiny_pack: Callable[..., Pack],
) -> None:
    pack = tiny_pack("llama")
    quick = replace(with_card(MUCH), host=Rates(1e8, 1e8))
    made, wish = plans(pack, (1, 1)), OffloadOptions(unattended=True)
    both = members(pack, quick, quick, options=OffloadOptions())
    assert batched(made, both, wish) != made
    assert fastest(both, wish) == 64
    for changed in (replace(both[1], options=OffloadOptions(crossover=7)), _windowed(both[1])):
        assert batched(made, [both[0], changed], wish) == made
        assert fastest([both[0], changed], wish) == 0
    assert fastest(both, replace(wish, crossover=7)) == 0


def test_how_many_at_once_is_for_the_node_with_the_least_room(tiny_pack: Callable[..., Pack]) -> None:
    """Pages are for these requests alone: with pages for all waiting requests, fewer would fit at once."""
    pack = tiny_pack("mixtral")
    wish = replace(BATCH, unattended=True)
    one, two = members(pack, with_card(MUCH), with_card(MUCH), options=OffloadOptions("ram", "ram", "batch"))
    found = fastest([one, two], wish), fastest([one, _narrow(two, 18)], wish)
    assert found[0] == 64 > found[1] > 0
    with pytest.raises(PlanError, match="cannot hold the model"):
        agree([one, _narrow(two, 18)])


def _narrow(member: GroupMember, mib: int) -> GroupMember:
    return replace(member, plan=replace(member.plan, options=replace(member.plan.options, memory=mib << 20)))


def _windowed(member: GroupMember) -> GroupMember:
    return replace(member, plan=replace(member.plan, options=replace(member.plan.options, window=2, retain=2)))


def _sparse(member: GroupMember) -> GroupMember:
    return replace(member, plan=replace(member.plan, options=replace(member.plan.options, sparsity="static")))


def test_figures_are_the_same_when_they_come_back(tiny_pack: Callable[..., Pack]) -> None:
    machine = replace(emulated_node(parse_emulated("t4")), bus=1e11)
    assert machine.accelerator is not None
    card = Card("emu", machine.accelerator.memory, "auto", "auto", "batch", 0, (), card_figures(machine))
    told = machine_from_message(machine.memory, card, None)
    there = replace(machine.accelerator, name="emu", follow=None)  # a group of nodes has no chains
    assert told == replace(machine, accelerator=there, disk=told.disk)
    assert told.disk.read == machine.disk.read
    assert card_figures(replace(machine, accelerator=None)) is None
    lying = replace(card, figures=replace(card.figures, up=0.0))  # type: ignore[type-var]
    assert machine_from_message(1 << 30, lying, None).accelerator == replace(
        laptop_gpu(), memory=card.memory, name="emu"
    )
    slow = machine_from_message(1 << 30, None, MachineSpeed(1e9, 2e9, 0))
    assert (slow.host.read, slow.host.operations, slow.accelerator) == (1e9, 2e9, None)


def test_a_session_batches_over_two_processes(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    pack = tiny_pack("mixtral")
    asked = prompts(pack.config.vocab, 12, seed=8, longest=20)
    with Session(RunOptions(str(pack.path), context=64, parallel=12, cache=tmp_path)) as session:
        expected = answers(session.engine.deployment, asked, 3)
    devices = DeviceOptions(("emu:1GiB,stretch=1",), (3 << 20,), OffloadOptions("ram", "ram", "batch"))
    options = RunOptions(
        str(pack.path), context=64, parallel=12, devices=devices, cache=tmp_path, local=1, split="1,2", memory=1 << 28
    )
    with Session(options) as session:
        link = session.node.link
        assert isinstance(link, BatchAccelerated)
        assert isinstance(link.settings.problem.limits.batch, int)
        assert answers(session.engine.deployment, asked, 3) == expected


def test_numbers_of_a_group_are_checked_by_the_receiver(tiny_pack: Callable[..., Pack]) -> None:
    from worker.plan.checks import check_assign

    own = plans(tiny_pack("llama"), (1, 1))[1]
    own = replace(own, peers=tuple(replace(peer, address="tcp://here:1") for peer in own.peers), collective="star")
    for told, said in [
        (GroupBatch(0, 1, True, 8), "batch"), (GroupBatch(4, 5, True, 8), "micro_batches"),
        (GroupBatch(4, 2, True, 0), "chunk"), (GroupBatch(4, 2, True, 513), "chunk"),
    ]:  # fmt: skip
        with pytest.raises(PlanError, match=said):
            check_assign(replace(own, options=replace(own.options, batch=told)))
    good = replace(own, options=replace(own.options, batch=GroupBatch(4, 2, True, 512)))
    check_assign(good)
    two_cards = Card("two", MUCH, "auto", "auto", "auto", 0, (MUCH,))
    with pytest.raises(PlanError, match="computes a batch on one accelerator"):
        check_assign(good, two_cards)

"""Prompts of a batch in the paper's schedule: layer by layer for all prompts, so each weight crosses the link once."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from master.batch.answering import BatchCounts
from master.batch.command import _run
from master.batch.results import BatchResults
from master.batch.source import BatchSource
from master.deployment.batching import longest_step
from master.generation.engine import Engine
from master.generation.request import Request
from master.options import RunOptions
from master.session import Session
from master.vocabulary.sampler import Sampler
from scheduler.model.machine import LAPTOP
from scheduler.model.roofline.policy import BatchWork
from tests.support.devices.grouping import alone
from tests.support.devices.offloading import GREEDY, answers, batched, offloaded, prompts
from tests.support.devices.shuffled import Shuffled
from tests.support.kernels.kernel_cases import native
from tpi.devices.options import DeviceOptions, OffloadOptions, Pipelining
from tpi.errors import TpiError
from tpi.net.fields import MAX_STEP_BYTES, GroupBatch, UsualRequest
from tpi.pack.reader import Pack
from tpi.progress import silent
from worker.node_plan import node_plan
from worker.pipelines.accelerated import BatchAccelerated
from worker.pipelines.agree import GroupMember

TOGETHER = GroupBatch(9, 3, True, 32)
LONG: dict[str, Any] = {"context": 64, "pool": 24, "chunk": 600, "batch": TOGETHER}  # tokens, pages; of a step, 600


def test_prompts_of_a_step_share_one_transfer_of_each_weight(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    pack = tiny_pack("mixtral")
    asked = prompts(pack.config.vocab, 9, seed=1, longest=50)
    with (
        closing(Shuffled(native, 0)) as device,
        offloaded(pack, tmp_path, {0: device}, OffloadOptions("ram", "ram", "batch"), **LONG) as deployment,
    ):
        link, engine = batched(deployment), Engine(deployment)
        passing = sum(link.offload.pieces[piece].nbytes for piece in link.offload.streamed_pieces)
        link.wait_idle()
        before = link.figures.weight_bytes
        for prompt in asked:
            engine.submit(Request(engine.admit(prompt), Sampler(GREEDY), 2, lambda _: True))
        engine.step()
        link.wait_idle()
        assert sum(map(len, asked)) > 5 * TOGETHER.chunk
        assert link.figures.weight_bytes - before == passing
        for request in engine.requests:
            engine.withdraw(request)
            engine.release(request.sequence)
        assert answers(deployment, asked) == alone(pack, tmp_path, asked)


@pytest.mark.parametrize(
    ("pipeline", "many", "longest"), [("batch", True, 40 * 128), ("batch", False, 512), ("performance", True, 256)]
)
def test_steps_are_long_in_an_unwatched_batch(
    pipeline: Pipelining, many: bool, longest: int, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    pack = tiny_pack("llama")
    devices = DeviceOptions(
        ("emu:1GiB,stretch=1",), (6 << 20,), OffloadOptions("ram", pipeline=pipeline, unattended=many)
    )
    options = RunOptions(str(pack.path), context=128, parallel=40, devices=devices, memory=1 << 30, cache=tmp_path)
    with Session(options) as session:
        assert isinstance(session.node.link, BatchAccelerated) == (pipeline == "batch")
        assert session.engine.deployment.limits.chunk == longest
        if isinstance(session.node.link, BatchAccelerated):
            assert session.node.link.pipeline.chunk <= 512


def test_requests_run_at_once_with_room_for_usual_lengths(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    pack, asked = tiny_pack("llama"), 100
    devices = DeviceOptions(
        ("emu:1GiB,stretch=1",), (6 << 20,), OffloadOptions("ram", pipeline="batch", unattended=True)
    )
    options = RunOptions(str(pack.path), context=128, parallel=asked, devices=devices, memory=1 << 30, cache=tmp_path)
    with Session(replace(options, usual=UsualRequest(50, 60))) as session:
        link, engine = session.node.link, session.engine
        assert isinstance(link, BatchAccelerated)
        assert link.settings.problem.request == BatchWork(asked, 50, 60)
        assert engine.deployment.pages.total == 4 * asked
        for prompt in prompts(pack.config.vocab, asked, seed=2, longest=6):
            engine.submit(Request(engine.admit(prompt), Sampler(GREEDY), 4, lambda _: True))
        engine.step()
        assert len(engine.admission.running) == asked
        for request in engine.requests:
            engine.withdraw(request)
            engine.release(request.sequence)


def test_requests_over_the_context_are_planned_as_answered(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    """The plan counts the tokens that fit into the context after the prompt. The session has a worker."""
    options = RunOptions(str(tiny_pack("llama").path), context=128, parallel=3, local=1, cache=tmp_path)
    with Session(replace(options, usual=UsualRequest(30, 10**30))) as session:
        assert session._deployer._usual == UsualRequest(30, 98)
        assert session.engine.deployment.pages.total == 3 * 4


def test_a_batch_that_ends_early_waits_for_no_long_step(
    tiny_pack: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are not computed yet raise an error instead."""
    pack = tiny_pack("llama")
    asked = tmp_path / "in.jsonl"
    asked.write_text('{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 3}}')
    source = BatchSource(asked)
    with (
        Session(RunOptions(str(pack.path), context=64, cache=tmp_path)) as session,
        BatchResults(tmp_path / "out.jsonl", source, ["llama"], list[str]().append) as results,
    ):
        monkeypatch.setattr(results, "write", _full)
        with pytest.raises(OSError, match="No space"):
            _run(session, ["llama"], source, results, BatchCounts(), silent)
        with pytest.raises(TpiError, match="ends early"):
            session.node.loop.on_block()


@pytest.mark.parametrize(("memory", "size"), [(1 << 30, 1), (64 << 20, 1), (1 << 34, 3)])
def test_a_step_is_as_long_as_memory_and_messages_allow(
    memory: int, size: int, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    member = _member(tiny_pack("llama"), memory, size)
    steps, hidden = longest_step(member), member.plan.config.hidden
    assert 512 <= steps <= member.plan.options.pages * 32
    assert size == 1 or 4 * hidden * steps <= MAX_STEP_BYTES
    assert steps == 512 or 4 * hidden * steps <= memory // 16


def _full(line: object, fields: object) -> None:
    raise OSError(28, "No space left on device")


def _member(pack: Pack, memory: int, size: int) -> GroupMember:
    from master.deployment.assignments import assignments
    from master.deployment.stages import one_stage
    from tpi.net.messages import NodeOptions, PeerAddress

    peers = [PeerAddress(rank, f"node {rank}", "") for rank in range(size)]
    options = NodeOptions(4096, 128 * 400, "f32", 512, memory=memory)
    stages = one_stage(pack, [1] * size)
    plan = node_plan(assignments(pack, stages, peers, options, session=1, epoch=1)[0])
    return GroupMember("one", plan, LAPTOP, OffloadOptions(pipeline="batch"))

"""Traces of whole runs: every node's spans, with embedding and head, however a command ends."""

import json
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from master import commands
from master.generation.answer import AnswerLimits
from master.options import RunOptions
from master.reporting.timeline import write_timeline
from master.session import Session
from master.vocabulary.sampler import Sampler, Sampling
from master.vocabulary.vocabulary import Vocabulary, table_block_bytes
from master.workers.cluster import Cluster
from scheduler.model.steady import judge_streaming
from scheduler.model.timeline import NO_OTHER_WAITS
from tests.support.cluster.cluster_helpers import MadeUpModel, fake_worker, step
from tests.support.cluster.single import Setting, single_node
from tests.support.commands import TPI, clean
from tests.support.generating import answer_in
from tests.support.models import TinyModel
from tests.support.processes.fake_worker import EXCHANGE, FAKE_SPANS
from tpi.errors import ModelError
from tpi.kernels.native import NativeChain
from tpi.kernels.spec import F32
from tpi.net.messages import PeerAddress
from tpi.pack.reader import Pack
from tpi.trace import TRACE_BYTES, Trace, clock
from worker.node import build
from worker.node_plan import node_plan
from worker.plan.fit import need


@pytest.fixture
def model(tiny_model: Callable[[str], TinyModel]) -> str:
    return str(tiny_model("llama").directory)


def spans(path: Path) -> list[tuple[int, str, str]]:
    """Return node, kind and name of every span in a trace."""
    events = json.loads(path.read_text())["traceEvents"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events if event["ph"] == "X")
    return [(event["pid"], event["cat"], event["name"]) for event in events if event["ph"] == "X"]


def test_a_worker_gives_its_spans_also_while_it_waits_in_a_step(tmp_path: Path) -> None:
    began, model = clock(), MadeUpModel()
    with fake_worker(tmp_path / "a") as (_, address), Cluster.connect([address]) as cluster:
        cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
        for number in range(FAKE_SPANS + 2):
            cluster.step(step(cluster.session, 1, number))
        assert cluster.stats()[0].steps == FAKE_SPANS + 2
        cluster.step(step(cluster.session, 1, FAKE_SPANS + 2, EXCHANGE))
        while cluster.spans(cluster.workers[0], count=0).dropped < 3:
            pass  # until the step has begun; it never ends
        own = Trace()
        own.add("compute", "head", clock(), clock())
        assert write_timeline(tmp_path / "trace.json", own, "master", cluster, began) == {"a": 3}
        page = cluster.spans(cluster.workers[0], 1, 1)
        assert [page.names[row[1]] for row in page.rows.tolist()] == ["step 1"]
    worker = [(1, "compute", f"step {number}") for number in range(FAKE_SPANS)]
    assert spans(tmp_path / "trace.json") == [(0, "compute", "head"), *worker]


def test_a_verdict_is_computed_only_where_it_is_asked_for(tmp_path: Path) -> None:
    model = MadeUpModel()
    with fake_worker(tmp_path / "a") as (_, address), Cluster.connect([address]) as cluster:
        cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
        assert cluster.stats()[0].steady is None
        asked = cluster.stats([NO_OTHER_WAITS])[0].steady
        assert asked is not None
        assert asked.window == 2


def test_between_two_tokens_nothing_is_judged(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[object] = []

    def counting(*arguments: Any) -> object:
        judged.append(arguments)
        return judge_streaming(*arguments)

    monkeypatch.setattr("worker.node.node.judge_streaming", counting)
    with Session(RunOptions(model, cache=tmp_path, window=1)) as session:
        sampler, limits = Sampler(Sampling(temperature=0)), AnswerLimits(3, ignore_eos=True)
        answer_in(session, [5, 6, 7], sampler, limits, mark=session.figures.mark)
        assert session.figures.marked is not None
        assert judged == []
        assert session.figures.report()[0].steady is not None
        assert len(judged) == 1


def test_a_trace_counts_in_the_budget() -> None:
    (plan,) = MadeUpModel().split(1, 1, [PeerAddress(0, "node", "")])
    traced = replace(plan, options=replace(plan.options, trace=True))
    assert need(node_plan(traced)).fixed - need(node_plan(plan)).fixed == TRACE_BYTES


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_ends_of_the_model_are_traced(name: str, tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    pack, trace = tiny_pack(name), Trace()
    x = np.ones((2, pack.config.hidden), np.float32)
    with single_node(pack, Setting(), cache=tmp_path) as (_, one):
        with Vocabulary(pack, one.budget, trace) as vocabulary:
            vocabulary.embedding([1, 2], [0, 1])
            resident = vocabulary.head(x)
        assert {row[:2] for row in trace.rows} == {("compute", "embedding"), ("compute", "head")}
        small = replace(one.budget, head_bytes=table_block_bytes(pack.head) // 2, embedding_bytes=0)
        trace = Trace()
        with Vocabulary(pack, small, trace) as vocabulary:
            vocabulary.embedding([1, 2], [0, 1])
            np.testing.assert_allclose(vocabulary.head(x), resident, rtol=1e-5, atol=1e-5)
            tiles = {f"head tile {index}" for index, _ in enumerate(vocabulary._streams[0].tiles())}
    found: dict[str, set[str]] = {kind: set() for kind in ("compute", "load", "stall")}
    for kind, span, *_ in trace.rows:
        found[kind].add(span)
    assert len(tiles) > 1
    assert found["compute"] == {"embedding", "head"} | tiles
    assert found["load"] == tiles
    assert "embedding" in found["stall"] <= {"embedding"} | tiles


def test_what_waits_inside_is_not_counted_as_computing_too(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    pack, trace = tiny_pack("llama"), Trace()
    with single_node(pack, Setting(), cache=tmp_path) as (_, one):
        small = replace(one.budget, head_bytes=table_block_bytes(pack.head) // 2, embedding_bytes=0)
        with Vocabulary(pack, small, trace) as vocabulary:
            for _ in range(3):
                vocabulary.embedding([1, 2], [0, 1])
                vocabulary.head(np.ones((1, pack.config.hidden), np.float32))
    queue = sorted((begin, end) for kind, _, begin, end in trace.rows if kind != "load")
    assert all(first[1] <= second[0] + 1000 for first, second in pairwise(queue))  # stalls: floats


def test_what_a_trace_has_no_room_for_is_told(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "Trace", partial(Trace, 10))
    monkeypatch.setenv("TPI_CACHE", str(tmp_path / "cache"))
    trace = tmp_path / "trace.json"
    done = CliRunner().invoke(commands.run, ["-m", model, "-p", "Hello", "-n", "3", "--trace", str(trace)])
    assert done.exit_code == 0, done.output
    (said,) = [line for line in done.stderr.splitlines() if "trace" in line]
    assert "lacks the last spans" in said
    assert " of master)" in said
    assert len(spans(trace)) == 10


def test_a_run_and_its_worker_are_traced_whole(model: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    command = [*TPI, "run", "-m", model, "-p", "Hello", "-n", "4", "--temp", "0", "--local", "1", "--trace", str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=clean(tmp_path), check=False)
    assert done.returncode == 0, done.stderr
    assert "trace" not in done.stderr
    found = set(spans(trace))
    assert {(0, "compute", "embedding"), (0, "compute", "head")} <= found
    assert {(rank, kind, name) for rank in (0, 1) for kind in ("compute", "allreduce") for name in ("ffn 0",)} <= found
    assert not {name for rank, _, name in found if rank == 1} & {"embedding", "head"}


def test_a_traced_node_has_a_span_for_each_block_and_token(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPI_CACHE", str(tmp_path / "cache"))
    run, hidden = NativeChain.run, list[F32]()

    def watched(chain: NativeChain, *arguments: Any) -> F32:
        hidden.append(run(chain, *arguments))
        return hidden[-1]

    monkeypatch.setattr(NativeChain, "run", watched)
    path, command = tmp_path / "trace.json", ["-m", model, "-p", "Hello", "-n", "4", "--temp", "0"]
    for trace in ([], ["--trace", str(path)]):
        done = CliRunner().invoke(commands.run, [*command, *trace])
        assert done.exit_code == 0, done.output
    assert len(hidden) == 2 * 3  # a chat's prompt is too long for a chain
    np.testing.assert_array_equal(hidden[:3], hidden[3:])
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "compute"]
    token = ["embedding", *(f"{kind} {layer}" for layer in range(2) for kind in ("attention", "ffn")), "head"]
    assert [name for name, _ in groupby(event["name"] for event in events)] == token * 4  # a head is two spans
    assert all(event["dur"] > 0 for event in events)
    assert all(first["ts"] + first["dur"] <= second["ts"] + 0.01 for first, second in pairwise(events))  # floats


def test_a_chat_is_traced_when_its_input_ends(model: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    done = subprocess.run(
        [*TPI, "chat", "-m", model, "-n", "4", "--temp", "0", "--trace", str(trace)],
        input="one\ntwo\n", capture_output=True, text=True, timeout=100, env=clean(tmp_path), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (0, "compute", "head") in spans(trace)


def test_a_chat_is_traced_when_it_is_interrupted_in_an_answer(model: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    command = [*TPI, "chat", "-m", model, "-n", "3000", "--temp", "0", "--local", "1", "--trace", str(trace)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=clean(tmp_path), **pipes) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(b"one\n")
        process.stdin.flush()
        process.stdout.read(1)  # the first token is there
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert b"Traceback" not in error
    assert {(rank, "compute", "ffn 0") for rank in (0, 1)} <= set(spans(trace))


@pytest.mark.parametrize("before", [None, b"", b"of another run"])
def test_a_run_that_fails_leaves_no_trace_that_it_made(before: bytes | None, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    if before is not None:
        trace.write_bytes(before)
    done = CliRunner().invoke(commands.run, ["-m", str(tmp_path / "no-model"), "-p", "Hello", "--trace", str(trace)])
    assert isinstance(done.exception, ModelError)
    assert (trace.read_bytes() if trace.exists() else None) == before

"""`tpi batch` without --parallel: the number of requests at once follows from the cost model, and is printed."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from master.batch.command import batch
from master.deployment.deployment import Concurrency
from master.generation.batcher import Batcher, Drafts, Work
from master.generation.engine import MOST_RUNNING
from master.generation.sequence import Sequence as Running
from master.options import RunOptions
from master.session import Session
from tests.support.models import TinyModel
from tpi.devices.options import DeviceOptions, OffloadOptions
from tpi.net.fields import UsualRequest
from tpi.pack.reader import Pack
from worker.pipelines.accelerated import BatchAccelerated

LINES = 512
SLOW_HOST = "emu:1GiB,stretch=1,launch=1ns,latency=1ns,host=0.0001,link=0.2GB/s"
CARD = ("--device", SLOW_HOST, "--gpu-memory", "6MiB", "--weights", "ram", "--kv", "ram")
SMALL = ("--dtype", "f32", "-c", "64", "--memory", "256MiB", "--workers", "none")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return short prompts of several lengths, with answers of two or three tokens."""
    path = tmp_path_factory.mktemp("asked") / "in.jsonl"
    path.write_text("".join(json.dumps(_line(number)) + "\n" for number in range(LINES)))
    return path


def _line(number: int) -> dict[str, Any]:
    body = {"prompt": f"{number} " * (1 + number % 3), "temperature": 0, "max_tokens": 2 + number % 2}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of requests that ran in each step."""
    found: list[int] = []
    pick = Batcher.pick

    def counted(batcher: Batcher, sequences: Sequence[Running], drafts: Drafts) -> list[Work]:
        found.append(len(sequences))
        return pick(batcher, sequences, drafts)

    monkeypatch.setattr(Batcher, "pick", counted)
    return found


def answered(asked: Path, out: Path, model: TinyModel, *flags: str) -> tuple[dict[str, Any], str]:
    """Return the compared parts of every answer by its custom_id, and the messages."""
    arguments = [str(asked), "-o", str(out), "-m", str(model.directory), "--cache", str(out.parent), *SMALL, *flags]
    done = CliRunner().invoke(batch, arguments, catch_exceptions=False, standalone_mode=False)
    lines = [json.loads(line) for line in out.read_text().split("\n") if line]
    assert len(lines) == LINES
    return {one["custom_id"]: one["response"]["body"]["choices"] for one in lines}, done.stderr


def test_more_than_64_of_512_lines_run_at_once_on_an_accelerator(
    asked: Path, running: list[int], tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    model = tiny_model("llama")
    expected, said = answered(asked, tmp_path / "host.jsonl", model, "--device", "cpu")
    assert max(running) <= 64
    assert "64 requests at once of 512: no accelerator batches them; --parallel asks for more\n" in said
    running.clear()
    found, said = answered(asked, tmp_path / "many.jsonl", model, *CARD)
    assert found == expected
    assert max(running) > 64, said
    assert "512 requests at once (N)\n" in said
    assert "computes batches of 512 in micro-batches of" in said


def test_what_is_asked_for_binds(
    asked: Path, running: list[int], tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    _, said = answered(asked, tmp_path / "few.jsonl", tiny_model("llama"), *CARD, "--parallel", "100")
    assert 64 < max(running) <= 100, said
    assert "100 requests at once (N)\n" in said


@pytest.mark.parametrize("lines", [200, 1])
def test_a_group_has_one_number_for_all_its_nodes(lines: int, tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    offload = OffloadOptions("ram", "ram", unattended=True)
    devices = DeviceOptions((SLOW_HOST,), (6 << 20,), offload)
    usual = UsualRequest(12, 6)
    options = RunOptions(
        str(tiny_pack("llama").path), 1, context=64, parallel=min(64, lines), batched=lines, usual=usual
    )
    with Session(replace(options, devices=devices, cache=tmp_path, memory=1 << 28)) as session:
        deployment, link = session.engine.deployment, session.node.link
        assert isinstance(link, BatchAccelerated)
        assert deployment.at_once == Concurrency(lines, lines, lines, batches=True)
        assert link.settings.problem.limits.batch == lines
        assert deployment.pages.total == max(lines, 2)  # of one context
        assert session.engine.admission.most == max(lines, MOST_RUNNING)


@pytest.mark.parametrize("memory", [28, 30])
def test_of_more_than_fit_more_than_half_run(memory: int, tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    """On the host, with pages for whole contexts, only a few of the requests do not fit."""
    path = str(tiny_pack("llama").path)
    options = RunOptions(path, context=64, parallel=500, memory=memory << 20, threads=1, cache=tmp_path)
    with Session(options) as session:
        found = session.engine.deployment.at_once
        assert found.words() == f"{found.requests} requests at once of 500: memory has no room for 500"
    assert 1 < found.requests < 500
    with Session(replace(options, parallel=found.requests * 31 // 30 + 2)) as session:
        again = session.engine.deployment.at_once
    assert found.requests <= again.requests < again.wanted

"""Ctrl-C of `tpi batch` while it recovers from a lost worker: it ends at once, and loses no request."""

import json
import os
import signal
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from threading import Event

import click
import pytest

from master.batch.command import batch
from master.batch.results import BatchResults
from master.deployment.deploy import Deployer
from master.deployment.deployment import Deployment
from master.workers.cluster import Cluster
from tests.support.house import house
from tests.support.models import TinyModel
from tpi.net.messages import Step

COUNT = 12
Deploy = Callable[[Deployer, Sequence[float]], Deployment]


def written(path: Path) -> Path:
    body = {"prompt": "one two three", "temperature": 0, "max_tokens": 6}
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body} for number in range(COUNT)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def wait_for_workers(self: Deployer, deploy: Deploy, shares: Sequence[float]) -> Deployment:
    """Wait for ever, like a deployment whose workers are never ready."""
    while True:
        self.cluster.poll()
        Event().wait(0.01)


def come_too_late(self: Deployer, deploy: Deploy, shares: Sequence[float]) -> Deployment:
    """Begin to load only when the deployment is no longer wanted."""
    while not self.cluster._broken_off:
        Event().wait(0.01)
    return deploy(self, shares)


@pytest.mark.parametrize("recovery", [wait_for_workers, come_too_late])
def test_it_ends_within_a_recovery(
    recovery: Callable[[Deployer, Deploy, Sequence[float]], Deployment],
    tmp_path: Path,
    tiny_model: Callable[[str], TinyModel],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    asked, out = written(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    model, cache = str(tiny_model("llama").directory), str(tmp_path / "cache")
    command = [
        str(asked),
        "-o",
        str(out),
        "-m",
        model,
        "--dtype",
        "f32",
        "-c",
        "64",
        "--parallel",
        "2",
        "--cache",
        cache,
    ]
    deploy, write, step, deployments, late = Deployer.deploy, BatchResults.write, Cluster.step, [], []
    with house(tmp_path, 1) as (laptop,):

        def deployed(self: Deployer, shares: Sequence[float]) -> Deployment:
            deployments.append(shares)
            if len(deployments) == 1:
                return deploy(self, shares)
            os.kill(os.getpid(), signal.SIGINT)
            return recovery(self, deploy, shares)

        def stepped(self: Cluster, what: Step, first: Container[int] | None = None) -> None:
            if len(deployments) > 1:
                late.append(what)
            step(self, what, first)

        def kill_then_write(self: BatchResults, *what: object) -> None:
            if not self.answered:
                laptop.stop()
            write(self, *what)  # type: ignore[arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(Deployer, "deploy", deployed)
            patched.setattr(BatchResults, "write", kill_then_write)
            patched.setattr(Cluster, "step", stepped)
            with pytest.raises(click.Abort):
                batch.main([*command, "--workers", laptop.address], standalone_mode=False)
    said, answered = capfd.readouterr().err, out.read_text().count("\n")
    assert len(deployments) == 2
    assert not late
    assert 1 <= answered < COUNT
    assert f"{answered} of {COUNT} requests are answered in {out}; run the same command to continue" in said
    assert batch.main(command, standalone_mode=False) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(line["custom_id"] for line in lines) == sorted(f"r{number}" for number in range(COUNT))
    assert len({line["response"]["body"]["choices"][0]["text"] for line in lines}) == 1

"""A worker that runs for weeks: it releases the memory of each session."""

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from master.options import RunOptions
from master.session import Session
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.cluster.cluster_helpers import real_worker
from tests.support.generating import generate
from tests.support.models import TinyModel

pytestmark = pytest.mark.bare

FEW, MANY = 5, 105  # sessions
GROWTH = 1536 << 10  # bytes between them: Python's own heap grows by a MiB at once; each session once left 30 kB


def test_a_worker_takes_as_much_after_many_sessions_as_after_few(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    model = str(tiny_model("llama").directory)
    taken = []
    with real_worker(tmp_path / "shards") as (process, address):
        placement = RunOptions(model, workers=(address,), context=64, threads=1, cache=tmp_path)
        for count in range(1, MANY + 1):
            with Session(placement) as session:
                sequence = session.engine.admit([1, 5, 9])
                list(generate(session.engine, sequence, Sampler(Sampling(temperature=0)), 2))
            if count in (FEW, MANY):
                worker = psutil.Process(process.pid)
                taken.append((worker.memory_info().rss, worker.num_threads()))
    (few, few_threads), (many, many_threads) = taken
    assert many - few < GROWTH
    assert many_threads <= few_threads

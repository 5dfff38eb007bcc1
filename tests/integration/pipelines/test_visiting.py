"""Pages that visit the accelerator, in drawn timings: they hold what was appended, and weights cross once a step."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from master.generation.engine import Engine
from master.generation.request import Request
from master.vocabulary.sampler import Sampler
from scheduler.transfer.queue import TransferQueue
from tests.support.devices.offloading import GREEDY, answers, batched, offloaded, prompts
from tests.support.devices.shuffled import Shuffled
from tests.support.kernels.kernel_cases import native
from tpi.devices.base import Pending
from tpi.devices.options import OffloadOptions
from tpi.devices.pages import Bytes
from tpi.kernels.kv import KvPages, pages_for
from tpi.kernels.spec import PAGE_TOKENS, Batch, KvArray
from tpi.pack.reader import Pack
from worker.pipelines.longhold import LongHold
from worker.pipelines.visiting import PageBuffer, VisitingPages, page_numbers

LAYERS, SEQUENCES, LONGEST, STEPS = 3, 4, 3 * PAGE_TOKENS, 6
SMALL: dict[str, Any] = {"context": 64, "pool": 24, "chunk": 32}


class Filled:
    """Sequences on drawn tables. Token t of layer l has one number in its keys, and another in its values."""

    def __init__(self, random: Random) -> None:
        each = pages_for(LONGEST)
        pages = random.sample(range(SEQUENCES * each), SEQUENCES * each)
        self.tables = np.array(pages, np.int32).reshape(SEQUENCES, each)
        self.lengths = [0] * SEQUENCES
        self.random = random

    def step(self) -> list[Batch]:
        """Return micro-batches that append some tokens to some sequences; one of them may come twice."""
        order = self.random.sample(range(SEQUENCES), SEQUENCES)
        cuts = [order[:2], order[2:], order[1:2]]
        return [batch for chosen in cuts if (batch := self._batch(chosen)) is not None]

    def _batch(self, chosen: list[int]) -> Batch | None:
        positions: list[int] = []
        rows: list[int] = []
        for row in chosen:
            count = min(self.random.choice([1, 1, 5, 40]), LONGEST - self.lengths[row])
            positions += range(self.lengths[row], self.lengths[row] + count)
            rows += [row] * count
            self.lengths[row] += count
        return Batch(np.array(positions, np.int32), np.array(rows, np.int32), self.tables) if rows else None


def attend(layer: int, batch: Batch, keys: KvArray, values: KvArray) -> None:
    """Use the pages as attention does: append this step's tokens, and read all earlier tokens."""
    for row, position in zip(batch.sequence.tolist(), batch.positions.tolist(), strict=True):
        page, place = batch.tables[row][position // PAGE_TOKENS], position % PAGE_TOKENS
        keys[page, 0, place], values[page, 0, place] = 1000 * layer + position, -position
    for row in set(batch.sequence.tolist()):
        end = int(batch.positions[batch.sequence == row].max()) + 1
        pages = batch.tables[row, : pages_for(end)]
        assert (keys[pages, 0].reshape(-1)[:end] == 1000 * layer + np.arange(end)).all()
        assert (values[pages, 0].reshape(-1)[:end] == -np.arange(end)).all()


@pytest.mark.parametrize("seeds", [range(at, at + 25) for at in range(0, 200, 25)], ids=str)
def test_what_is_attended_to_is_all_that_was_appended(seeds: range) -> None:
    for seed in seeds:
        with closing(Shuffled(native, seed)) as device, closing(TransferQueue()) as queue:
            filled = Filled(Random(seed))
            visiting = visiting_pages(device, queue, filled.tables.size)
            for _ in range(STEPS):
                batches = filled.step()
                visits = [(layer, part) for layer in range(LAYERS) for part in range(len(batches))]
                visiting.begin(batches, visits)
                pending: list[Pending[None]] = []
                for layer, part in visits:
                    with visiting.hold(layer, part) as (keys, values, batch):
                        pending.append(device.start(partial(attend, layer, batch, keys, values)))
                for each in pending:
                    each.wait()
            visiting.wait_saved()


def visiting_pages(device: Shuffled, queue: TransferQueue, pages: int) -> VisitingPages:
    """Return two rooms that hold everything, whose home has one head and one value."""
    home = KvPages.allocate(range(LAYERS), pages, 1, 1, "f32")
    there, here = (KvPages.allocate(range(2), pages, 1, 1, "f32", memory) for memory in (device.memory.allocate, None))
    rooms = [PageBuffer(there.keys[at], there.values[at], (here.keys[at], here.values[at])) for at in range(2)]
    return VisitingPages(device, home, rooms, queue)


@given(st.integers(0, 10_000))
def test_a_room_numbers_pages_by_what_happens_to_them(seed: int) -> None:
    filled = Filled(Random(seed))
    for batch in (batch for _ in range(3) for batch in filled.step()):
        numbers = page_numbers(batch)
        assert len(set(numbers.host_pages)) == len(numbers.host_pages)
        written = set(batch.tables[batch.sequence, batch.positions // PAGE_TOKENS].tolist())
        assert set(numbers.host_pages[numbers.written :]) == written
        for old, new in zip(
            zip(batch.sequence.tolist(), batch.positions.tolist(), strict=True),
            zip(numbers.batch.sequence.tolist(), numbers.batch.positions.tolist(), strict=True),
            strict=True,
        ):
            upto = old[1] // PAGE_TOKENS + 1
            mine = [numbers.host_pages[page] for page in numbers.batch.tables[new[0], :upto]]
            assert mine == batch.tables[old[0], :upto].tolist()


def test_the_host_attends_after_all_appended_pages_are_back(
    tiny_pack: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = tiny_pack("llama")
    asked = prompts(pack.config.vocab, 4, seed=1)
    with (
        closing(Shuffled(native, 0)) as device,
        offloaded(pack, tmp_path, {0: device}, OffloadOptions("ram", "ram", "batch"), **SMALL) as deployment,
    ):
        accelerated = batched(deployment, 2)
        attending = accelerated.lanes.attend
        late: list[bool] = []

        def noted(name: str, arrived: Callable[[], Any], call: Callable[[Any], Any]) -> Pending[Any]:
            assert accelerated.visiting is not None
            saves = [save for every in accelerated.visiting._saves.values() for save in every]
            late.extend(not save.succeeded for save in saves)
            return attending(name, arrived, call)

        monkeypatch.setattr(accelerated.lanes, "attend", noted)
        for seed in range(12):
            device._random = Random(seed)
            answers(deployment, asked, 2)
        assert not any(late)


def test_each_streamed_weight_crosses_the_link_once_a_step(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    pack = tiny_pack("mixtral")
    with (
        closing(Shuffled(native, 0)) as device,
        offloaded(pack, tmp_path, {0: device}, OffloadOptions("ram", "ram", "batch"), **SMALL) as deployment,
    ):
        link, engine = batched(deployment, 2), Engine(deployment)
        for prompt in prompts(pack.config.vocab, 9, seed=1, longest=3):
            engine.submit(Request(engine.admit(prompt), Sampler(GREEDY), 20, lambda _: True))
        engine.step()
        link.wait_idle()
        before = link.figures.weight_bytes
        steps = 5
        for _ in range(steps):
            engine.step()
        link.wait_idle()
        passing = sum(link.offload.pieces[piece].nbytes for piece in link.offload.streamed_pieces)
        assert link.figures.weight_bytes - before == steps * passing


def test_weights_are_held_from_a_steps_first_visit_to_its_last() -> None:
    events: list[str] = []

    @contextmanager
    def hold() -> Iterator[Bytes]:
        events.append("held")
        yield np.zeros(1, np.uint8)
        events.append("given back")

    class Again:
        """A hold that may be entered several times."""

        def __enter__(self) -> Bytes:
            self._now = hold()
            return self._now.__enter__()

        def __exit__(self, *error: Any) -> None:
            self._now.__exit__(None, None, None)

    held = LongHold(Again())
    for visits in (3, 1):
        held.begin(visits)
        for left in reversed(range(visits)):
            with held as data:
                assert data.size == 1
                assert events == ["held"]
            assert (events == ["held"]) == (left > 0)
        assert events.pop() == "given back"
        events.clear()
    held.begin(2)
    with held:
        pass
    held.close()  # the step breaks off
    held.close()
    assert events == ["held", "given back"]

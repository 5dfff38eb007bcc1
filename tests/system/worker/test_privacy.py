"""Data that never leaves the master: text, token ids, embedding, head. All messages and files are searched for it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from allreduce import connections
from allreduce._mailbox import Mailbox
from master.generation.answer import AnswerLimits
from master.options import RunOptions
from master.session import Session
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.generating import answer_in
from tests.support.models import TinyModel
from tpi.net.codec import Buffer, decode
from tpi.net.messages import Step
from tpi.net.transfers import UnitData
from tpi.pack.reader import Pack, PackBlock

PROMPT = "punctuation and numbers in every room, but private ones: 4711"


class Wire:
    """All that the master sends on its three planes: whole frames, and of sums the payload."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[list[bytes]] = []
        self.sums: list[bytes] = []
        sums = self.sums

        class Recorder(Mailbox):
            def send(self, ranks: Sequence[int], number: int, values: npt.NDArray[np.float32], wire: int) -> None:
                super().send(ranks, number, values, wire)
                sums.append(bytes(values))

            def send_all(
                self, messages: Iterable[tuple[Sequence[int], int, npt.NDArray[np.float32]]], wire: int
            ) -> None:
                messages = list(messages)
                super().send_all(messages, wire)
                sums.extend(bytes(values) for _, _, values in messages)

        monkeypatch.setattr(connections, "Mailbox", Recorder)

    def tap(self, way: str, frames: Sequence[Buffer]) -> None:
        if way == "sent":
            self.messages.append([bytes(frame) for frame in frames])

    @property
    def frames(self) -> Iterator[bytes]:
        for message in self.messages:
            yield from message
        yield from self.sums


@pytest.fixture(scope="module", params=["llama", "opt", "gemma4e"])
def talk(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], TinyModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Wire, Pack, list[int], str, Path]]:
    """Run one answer over two workers; record the messages, the pack, all token ids, the answer, and the cache."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as monkeypatch:
        wire = Wire(monkeypatch)
        placement = RunOptions(
            str(tiny_model(request.param).directory), local=2, cache=cache, collective="auto"
        )  # over sockets
        with Session(placement, wire.tap) as session:
            prompt, greedy = session.tokenizer.encode(PROMPT), Sampler(Sampling(temperature=0))
            made = answer_in(session, prompt, greedy, AnswerLimits(16, ignore_eos=True))
            yield wire, session.pack, [*prompt, *made.token_ids], made.text, cache


def test_no_text(talk: tuple[Wire, Pack, list[int], str, Path]) -> None:
    wire, _, _, text, cache = talk
    # a random model may answer with nothing that can be shown
    secrets = [PROMPT.encode(), PROMPT[:12].encode(), *([text.encode()[:8]] if len(text.encode()) >= 8 else [])]
    assert wire.sums
    assert not [frame for frame in wire.frames for secret in secrets if secret in frame]
    assert not [path for path in files(cache) for secret in secrets if secret in path.read_bytes()]


def test_no_token_ids(talk: tuple[Wire, Pack, list[int], str, Path]) -> None:
    import msgpack

    wire, _, tokens, _, cache = talk
    window = tokens[3:9]
    codings = [np.array(window, dtype).tobytes() for dtype in ("<i2", "<i4", "<i8", "<f4", ">i4")]
    codings.append(b"".join(msgpack.packb(token) for token in window))
    assert not [frame for frame in wire.frames for coding in codings if coding in frame]
    assert not [path for path in files(cache) for coding in codings if coding in path.read_bytes()]


def test_steps_carry_hidden_states_and_counts_only(talk: tuple[Wire, Pack, list[int], str, Path]) -> None:
    wire, pack, tokens, _, _ = talk
    steps = [message for frames in wire.messages if isinstance(message := decode(frames), Step) and message.entries]
    assert sum(entry.position == 0 for step in steps for entry in step.entries) == 2  # the prompt, to each worker
    assert len(steps) > 2
    for step in steps:
        assert step.x.shape == (sum(entry.count for entry in step.entries), pack.config.hidden)
        assert step.per_layer.shape == (len(step.x), pack.config.per_layer_values)
        numbers = [number for entry in step.entries for number in (entry.sequence, entry.position, *entry.appended)]
        assert numbers != tokens[: len(numbers)]


def test_no_embedding_or_head(talk: tuple[Wire, Pack, list[int], str, Path]) -> None:
    wire, pack, _, _, cache = talk
    tables = [block for block in (pack.embedding, pack.head, pack.positions, *pack.per_layer) if block is not None]
    layers = {bytes.fromhex(block.id) for block in pack.walk()}
    sent = [message for frames in wire.messages if isinstance(message := decode(frames), UnitData)]
    assert {units.block for units in sent} <= layers
    units = {unit for table in tables for unit in table_units(table)}
    rows = {unit[: 4 * pack.config.hidden] for unit in units if any(unit)}
    assert not [row for row in rows for message in sent if row in bytes(message.data)]
    stored = [path.read_bytes() for path in files(cache)]
    assert stored
    assert not [row for row in rows for content in stored if row in content]
    assert {sha256(unit).hexdigest() for unit in units}.isdisjoint(path.name for path in files(cache))


def files(cache: Path) -> list[Path]:
    """Return every file that a worker has."""
    return [path for path in (cache / "local").rglob("*") if path.is_file()]


def table_units(table: PackBlock) -> list[bytes]:
    run = table.run("row")
    return [unit.tobytes() for unit in table.read_units("row", 0, run.units)]

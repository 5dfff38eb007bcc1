"""The codec: a message survives encoding and decoding, and other bytes raise MessageError."""

import dataclasses
import random
import time
import tracemalloc
from typing import Annotated, Any, Literal

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cluster.cluster_helpers import step
from tests.support.cluster.message_strategies import any_message
from tpi.errors import MessageError
from tpi.net import codec
from tpi.net.codec import FRAME_BYTES, HEADER_BYTES, MAX_FRAMES, WrongProtocolError, decode, encode, protocol
from tpi.net.fields import Id64, Name
from tpi.net.messages import Bye, Heartbeat, Join, PeerAddress, Step
from tpi.net.questions import AskLink
from tpi.net.schema import Between, Pieces
from tpi.net.transfers import Need, UnitData


def same(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    for field in dataclasses.fields(one):  # type: ignore[arg-type]
        a, b = getattr(one, field.name), getattr(other, field.name)
        equal = np.array_equal(a, b) and a.dtype == b.dtype if isinstance(a, np.ndarray) else a == b
        if not equal:
            return False
    return True


@given(any_message())
@settings(deadline=None)
def test_what_is_encoded_decodes_equal(message: object) -> None:
    frames = [bytes(frame) for frame in encode(message)]
    assert same(decode(frames), message)
    assert [bytes(frame) for frame in encode(decode(frames))] == frames


@given(any_message(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=300)
def test_mutated_bytes_are_a_message_or_a_message_error(message: object, rng: random.Random) -> None:
    frames = [bytearray(frame) for frame in encode(message)]
    for _ in range(rng.randint(1, 4)):
        mutate(frames, rng)
    try:
        decoded = decode([bytes(frame) for frame in frames])
    except MessageError:
        return
    assert same(decode([bytes(frame) for frame in encode(decoded)]), decoded)


@pytest.mark.parametrize("ranks", [(), (0,), (1, 0), (0, 2), (0, 1, 2)])
def test_a_link_is_between_two_nodes_with_addresses(ranks: tuple[int, ...]) -> None:
    peers = tuple(PeerAddress(rank, "lap", "tcp://10.0.0.1:9991") for rank in ranks)
    with pytest.raises(MessageError, match="a link is not between two nodes"):
        AskLink(7, 1, 5, 0, 0.5, peers)
    with pytest.raises(MessageError, match="a link is not between two nodes"):
        AskLink(7, 1, 5, 0, 0.5, (PeerAddress(0, "lap", ""), PeerAddress(1, "desk", "tcp://10.0.0.1:9991")))


def mutate(frames: list[bytearray], rng: random.Random) -> None:
    kind = rng.choice(["flip", "flip", "flip", "cut", "grow", "drop", "repeat", "empty"])
    if kind == "drop" and frames:
        frames.pop(rng.randrange(len(frames)))
    elif kind == "empty":
        frames.insert(rng.randint(0, len(frames)), bytearray())
    elif kind == "repeat" and frames:
        frames.append(bytearray(rng.choice(frames)))
    elif frames and (frame := rng.choice(frames)):
        at = rng.randrange(len(frame))
        if kind == "cut":
            del frame[at:]
        elif kind == "grow":
            frame[at:at] = rng.randbytes(rng.randint(1, 9))
        else:
            frame[at] = rng.randrange(256)


@given(st.lists(st.binary(max_size=200), max_size=5))
@settings(deadline=None)
def test_random_frames_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(MessageError):
        decode(frames)


def header(*fields: object) -> list[bytes]:
    return [msgpack.packb([protocol(), *fields])]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        header(),
        header("Nothing", 1),
        header("ModelConfig", 1),
        header("Bye"),
        header("Bye", 1, 2),
        header("Bye", True),
        header("Bye", -1),
        header("Bye", 1.0),
        header("Bye", "1"),
        header("Bye", [[[[]]]]),
        [*header("Bye", 1), b"more"],
        [*header("Bye", 1), b""],
        [b"\xdd\xff\xff\xff\xff"],
        [b"\x91" * 100_000],
        [msgpack.packb({"a": 1})],
        header("Heartbeat", 1, 1, 1, "asleep", 1),
        header("Step", 1, 1, 1, [], [], [0, 2**40]),
        header("Step", 1, 1, 1, [], [], [2**30, 2**30]),
        header("Step", 1, 1, 1, [[1, 0, 2, []]], [], [1, 0]),
        header("Need", b"short", "query", 0, 1),
    ],
)
def test_wrong_headers_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(MessageError):
        decode(frames)


def test_another_protocol_is_named() -> None:
    other = protocol() ^ 1
    with pytest.raises(WrongProtocolError, match=rf"^tpi 0\.9 \(protocol {other:x}\)$"):
        decode([msgpack.packb([other, "Join", "0.9", 7])])
    with pytest.raises(WrongProtocolError, match=r"^tpi 0\.9 \(protocol 6\)$"):
        decode([msgpack.packb([6, "Refuse", "0.9 (protocol 6)", 0, "version", ""])])
    with pytest.raises(WrongProtocolError, match=rf"^a tpi of protocol {other:x}$"):
        decode([msgpack.packb([other, "Bye", 7])])


@pytest.mark.parametrize(
    "changed",
    [
        [("session", Id64), ("name", Name)],
        [("name", Name), ("session", Id64), ("version", Name)],
        [("version", Name), ("session", Id64), ("title", Name)],
        [("version", Name), ("session", Id64), ("name", str)],
        [("version", Name), ("session", Id64), ("name", Name | None)],
        [("version", Name), ("session", Id64), ("name", tuple[Name, ...])],
        [("version", Name), ("session", Annotated[int, Between(0, 7)]), ("name", Name)],
        [("version", Name), ("session", Id64), ("name", Literal["a", "b"])],
        [("version", Name), ("session", Id64), ("name", Name), ("more", bool)],
    ],
)
def test_a_changed_message_is_another_protocol(changed: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Change a message, but not the version: the protocol number differs."""
    before = protocol()
    altered = dataclasses.make_dataclass("Join", changed, frozen=True)
    altered.__module__ = Join.__module__
    monkeypatch.setitem(codec._classes, "Join", altered)
    try:
        protocol.cache_clear()
        assert protocol() != before
    finally:
        monkeypatch.undo()
        protocol.cache_clear()
    assert protocol() == before


def test_another_sense_of_the_messages_is_another_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    before = protocol()
    monkeypatch.setattr(codec, "MEANING", codec.MEANING + 1)
    try:
        assert protocol.__wrapped__() != before
    finally:
        monkeypatch.undo()


@pytest.mark.parametrize(
    "message",
    [
        Join("v" * 300, 1, "m"),
        Join("v", 2**64, "m"),
        Join("v", -1, "m"),
        Heartbeat(1, 1, 1, "asleep", 1),  # type: ignore[arg-type]
        Bye(True),
        Need(b"", "query", 0, 1),
        dataclasses.replace(step(1, 1, 1), x=np.zeros((1, 4), np.float64)),
        dataclasses.replace(step(1, 1, 1), x=np.zeros(1, np.float32)),
        "text",
    ],
)
def test_what_breaks_the_limits_is_not_sent(message: object) -> None:
    with pytest.raises(MessageError):
        encode(message)


def test_hidden_states_arrive_aligned_and_writable() -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3).T  # not contiguous
    sent = dataclasses.replace(step(1, 1, 1, tokens=3), x=x)
    padded = [memoryview(b"x" + bytes(frame))[1:] for frame in encode(sent)]
    received = decode(padded)
    assert isinstance(received, Step)
    np.testing.assert_array_equal(received.x, x)
    assert received.x.flags.aligned
    assert received.x.flags.c_contiguous
    assert received.x.flags.writeable


def test_large_messages_travel_in_small_frames() -> None:
    data = memoryview(np.random.default_rng(0).bytes(3 * FRAME_BYTES + 5))
    frames = encode(UnitData(bytes(32), "query", 0, 1, data))
    assert len(frames) == 5
    assert max(len(frame) for frame in frames) == FRAME_BYTES
    assert decode([bytes(frame) for frame in frames]).data == data
    with pytest.raises(MessageError):
        decode([bytes(frame) for frame in frames[:-1]])


@pytest.mark.parametrize("filler", [b"\x90", b"\x01", b"\xa1a", b"\xc4\x00", b"\x80", b"\xc0"])
def test_a_hostile_header_takes_little_memory(filler: bytes) -> None:
    count = (HEADER_BYTES - 5) // len(filler)
    bomb = b"\xdd" + count.to_bytes(4, "big") + filler * count
    tracemalloc.start()
    with pytest.raises(MessageError):
        decode([bomb])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_many_frames_cost_no_more_than_few() -> None:
    """A hostile header may take no bytes tens of thousands of times.

    That costs the same with many frames as with few.
    """

    def seconds(frames: int) -> float:
        pieces = Pieces(FRAME_BYTES, [b"x"] * frames)
        begun = time.thread_time()
        for _ in range(20_000):
            pieces.take(0)
        return time.thread_time() - begun

    few, many = (min(seconds(frames) for _ in range(3)) for frames in (1, MAX_FRAMES - 1))
    assert many < 5 * few

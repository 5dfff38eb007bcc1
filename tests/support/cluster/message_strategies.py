"""Hypothesis strategies for every message, made from the annotations that the codec checks."""

import dataclasses
import types
import typing
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.support.cluster.cluster_helpers import MadeUpModel
from tpi.net import messages, questions, transfers
from tpi.net.messages import Assign, PeerAddress, Step, StepEntry
from tpi.net.questions import AskLink
from tpi.net.schema import ArrayField, Between, Raw

Strategy = st.SearchStrategy[Any]

MESSAGES = [
    questions.Inquiry, questions.Condition, questions.Echo,
    messages.Join, messages.Hello, messages.Refuse, transfers.Offer, transfers.Missing, transfers.Need,
    transfers.UnitData, transfers.Unavailable, messages.Ready, messages.Abort, messages.Heartbeat, questions.AskStats,
    questions.Stats, questions.MeasuredLink, questions.AskDisk,
    questions.MeasuredDisk, questions.AskSpans, questions.Spans, messages.Failure,
    messages.Alive, messages.Bye,
]  # fmt: skip


def value(annotation: Any) -> Strategy:
    limit = None
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, limit = typing.get_args(annotation)
    arguments = typing.get_args(annotation)
    if isinstance(limit, ArrayField):
        return st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 4), max_size=5).map(
            lambda rows: np.asarray(rows, np.int64).reshape(-1, 4)
        )
    if isinstance(limit, Raw):
        return st.binary(max_size=300).map(memoryview if annotation is memoryview else bytes)
    if typing.get_origin(annotation) is typing.Literal:
        return st.sampled_from(arguments)
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return st.one_of([value(argument) for argument in arguments])
    if typing.get_origin(annotation) is tuple:
        return st.lists(value(arguments[0]), max_size=3).map(tuple)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return of(annotation)
    return scalar(annotation, limit)


def scalar(kind: type, limit: Between | None) -> Strategy:
    if kind is bool:
        return st.booleans()
    if kind is type(None):
        return st.none()
    low, high = (limit.low, limit.high) if limit else (0, 100)
    if kind is int:
        return st.integers(int(low), int(high))
    if kind is float:
        return st.floats(low, high, allow_nan=False)
    if kind is str:
        return st.text(max_size=min(int(high), 40))
    return st.binary(min_size=int(low), max_size=int(high))


def of(cls: type) -> Strategy:
    hints = typing.get_type_hints(cls, include_extras=True)
    return st.builds(cls, **{field.name: value(hints[field.name]) for field in dataclasses.fields(cls)})


@st.composite
def steps(draw: st.DrawFn) -> Step:
    small = of(StepEntry).map(lambda entry: dataclasses.replace(entry, count=entry.count % 4))
    entries = draw(st.lists(small, max_size=4))
    rows = sum(entry.count for entry in entries)
    x = np.random.default_rng(draw(st.integers(0, 9))).standard_normal((rows, draw(st.integers(0, 40))))
    session, epoch, number = draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 9)), draw(st.integers(0, 9))
    return Step(session, epoch, number, tuple(entries), tuple(draw(st.lists(st.integers(0, 99)))), x.astype(np.float32))


@st.composite
def assigns(draw: st.DrawFn) -> Assign:
    model = MadeUpModel(layers=draw(st.integers(1, 3)), same=draw(st.booleans()))
    peers = (PeerAddress(0, "master", ""), draw(of(PeerAddress)), draw(of(PeerAddress)))
    plans = model.split(draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 99)), peers, draw(st.integers(0, 8)))
    return draw(st.sampled_from(plans))


@st.composite
def link_questions(draw: st.DrawFn) -> AskLink:
    one, other = (dataclasses.replace(draw(of(PeerAddress)), rank=rank, address=f"tcp://a:{rank}") for rank in (0, 1))
    session, number = (draw(st.integers(0, 2**64 - 1)) for _ in range(2))
    return AskLink(
        session, draw(st.integers(0, 9)), number, draw(st.integers(0, 1)), draw(st.floats(0, 9)), (one, other)
    )


def any_message() -> Strategy:
    return st.one_of(*[of(cls) for cls in MESSAGES], steps(), assigns(), link_questions())

"""Grammars: compiled once, copied for each answer, and refused if they would take long."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from threading import Thread
from typing import Any

import numpy as np
import psutil
import pytest

from master.api.answers import constraint, grammars, trial
from master.api.answers.constraint import Grammars
from master.api.failures import RequestError
from master.confined.process import ConfinedProcess, NotTriedError
from master.text.tokenizer import Tokenizer
from tpi.errors import BusyError
from tpi.pack.reader import Pack

_SECONDS = 4  # of processor time; what is refused takes a fifth of that where nothing else runs


@pytest.fixture(scope="module")
def grammars_of(tiny_pack: Callable[..., Pack]) -> Iterator[Grammars]:
    pack = tiny_pack("llama")
    with closing(Grammars(Tokenizer.load(pack), pack.config.vocab)) as grammars_of:
        yield grammars_of


def test_answers_that_hold_up_all_others_end_together(grammars_of: Grammars, tiny_pack: Callable[..., Pack]) -> None:
    logits = np.zeros(tiny_pack("llama").config.vocab, np.float32)
    compiled = grammars_of.compiled(grammars.whole(grammars.of_pattern("slow"), None, False, repr), "x")
    answers = [compiled.copy() for _ in range(3)]
    for _ in range(1000):
        answers[0].share.spend(0.004)
    answers[0].allow(logits)
    for _ in range(3):
        answers[0].share.spend(0.1)
    for answer in answers:
        with pytest.raises(RequestError, match="takes too long to follow"):
            answer.allow(logits)
    for _ in range(100):
        answers[0].share.spend(0.0)
    assert np.isfinite(answers[1].allow(logits)).any()


def test_a_grammar_that_met_a_busy_machine_is_tried_again(
    grammars_of: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    lark = grammars.whole(grammars.of_pattern("busy then free"), None, False, repr)

    def fail(self: ConfinedProcess, request: object) -> object:
        raise NotTriedError("a process for it cannot be started: no memory")

    with monkeypatch.context() as patch:
        patch.setattr(ConfinedProcess, "ask", fail)
        with pytest.raises(BusyError, match=r"x could not be compiled: a process for it cannot be started"):
            grammars_of.compiled(lark, "x")
    assert grammars_of.compiled(lark, "x")


def schema(properties: int, required: bool) -> str:
    names = {f"p{number}": {"type": "string"} for number in range(properties)}
    more: dict[str, Any] = {"required": [*names], "additionalProperties": False} if required else {}
    return grammars.whole(grammars.of_schema({"type": "object", "properties": names, **more}), None, False, repr)


def test_copies_go_their_own_ways(grammars_of: Grammars, tiny_pack: Callable[..., Pack]) -> None:
    pack = tiny_pack("llama")
    logits, tokenizer = np.zeros(pack.config.vocab, np.float32), Tokenizer.load(pack)
    compiled = grammars_of.compiled(grammars.whole(grammars.of_pattern("ab|cd"), None, False, repr), "x")
    assert compiled is grammars_of.compiled(grammars.whole(grammars.of_pattern("ab|cd"), None, False, repr), "x")
    first, second = compiled.copy(), compiled.copy()
    (a,), (c,) = tokenizer.encode("a", special=False), tokenizer.encode("c", special=False)
    begins = np.isfinite(first.allow(logits))
    assert begins[a]
    assert begins[c]
    first.accept(a)
    assert not np.isfinite(first.allow(logits))[a]
    assert np.array_equal(np.isfinite(second.allow(logits)), begins)
    assert np.array_equal(np.isfinite(compiled.copy().allow(logits)), begins)


def pattern(text: str) -> str:
    return grammars.whole(grammars.of_pattern(text), None, False, repr)


def test_the_last_ones_are_kept_within_their_memory(grammars_of: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(number: int) -> Any:
        return grammars_of.compiled(pattern(f"x{{{number}}}"), "x")

    first, second = compiled(1), compiled(2)
    monkeypatch.setattr(constraint, "_MOST_KEPT", first.share.size + second.share.size)
    assert compiled(1) is first
    compiled(1000)
    assert compiled(1) is first or compiled(2) is not second
    assert sum(one.share.size for one in grammars_of._kept.values()) <= first.share.size + second.share.size


def test_grammars_of_live_answers_are_within_their_memory_too() -> None:
    room = constraint.GrammarMemory(10)
    shares = [room.take(5), room.take(5)]
    with pytest.raises(BusyError, match="try again later"):
        room.take(1)
    shares.pop()
    assert room.take(5).size == 5


def test_large_ones_are_not_kept_beside_each_other(grammars_of: Grammars) -> None:
    first = grammars_of.compiled(schema(2400, required=True), "x")
    assert grammars_of.compiled(schema(2400, required=True), "x") is first
    second = grammars_of.compiled(schema(2399, required=True), "x")
    assert grammars_of.compiled(schema(2399, required=True), "x") is second
    assert grammars_of.compiled(schema(2400, required=True), "x") is not first


@pytest.mark.parametrize(("properties", "required"), [(1000, False), (2000, True)])
def test_large_schemas_are_taken(properties: int, required: bool, grammars_of: Grammars) -> None:
    assert grammars_of.compiled(schema(properties, required), "x")


@pytest.mark.parametrize(("properties", "required"), [(3000, False), (4000, False), (4000, True)])
def test_what_takes_long_to_compile_is_refused_before(properties: int, required: bool, grammars_of: Grammars) -> None:
    begun = time.thread_time()
    with pytest.raises(RequestError, match=r"^tools.*; (simplify|shorten) it$") as refused:
        grammars_of.compiled(schema(properties, required), "tools")
    assert time.thread_time() - begun < _SECONDS
    assert refused.value.field == "tools"


MULTIPLE = {"type": "integer", "multipleOf": 1999957}
COSTLY: dict[str, Any] = {
    "a large multiple": MULTIPLE,
    "a multiple of many digits": {"type": "integer", "multipleOf": 9999991},
    "multiples that multiply": {"allOf": [{"type": "integer", "multipleOf": number} for number in (97, 89, 83, 79)]},
    "one of many": {"anyOf": [{"type": "string"}, {"type": "array", "items": MULTIPLE}]},
    "a definition": {"$defs": {"a": MULTIPLE}, "type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}},
    "a property": {"type": "object", "patternProperties": {"^x": MULTIPLE}, "properties": {}},
    "counts of counts": {"type": "string", "pattern": "^(a{1000}){1000}$"},
    "counts of counts in names": {"type": "object", "patternProperties": {"^(a{1000}){1000}$": {}}, "properties": {}},
    "many multiples": {"anyOf": [{"type": "integer", "multipleOf": 29_989 + 2 * number} for number in range(40)]},
}


@pytest.mark.parametrize("case", COSTLY)
def test_what_takes_too_much_is_refused_wherever_it_stands(case: str, grammars_of: Grammars) -> None:
    before = psutil.Process().memory_info().rss
    begun = time.thread_time()
    lark = grammars.whole(grammars.of_schema(COSTLY[case]), None, False, repr)
    for _ in range(2):
        with pytest.raises(RequestError) as refused:
            grammars_of.compiled(lark, "tools", "the tool look")
        assert "the tool look" in str(refused.value)
        assert refused.value.field == "tools"
    assert time.thread_time() - begun < _SECONDS  # none of it in this process
    assert psutil.Process().memory_info().rss - before < 64 << 20


CHEAP: dict[str, Any] = {
    "long strings": {"type": "string", "minLength": 5, "maxLength": 1_000_000},
    "long arrays": {"type": "array", "items": {"type": "integer"}, "maxItems": 10_000},
    "a wide range": {"type": "integer", "minimum": -(10**18), "maximum": 10**18 + 7},
    "a small multiple": {"type": "integer", "multipleOf": 250},
    "cents": {"type": "number", "multipleOf": 0.01, "minimum": 0},
    "many names": {"enum": [f"name {number}" for number in range(5000)]},
    "itself": {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
    "a date": {"type": "string", "format": "date-time"},
    "a pattern": {"type": "string", "pattern": "^[a-z]{1,100}(-[a-z0-9]{1,50}){0,10}$"},
}


@pytest.mark.parametrize("case", CHEAP)
def test_what_takes_little_is_taken(case: str, grammars_of: Grammars) -> None:
    assert grammars_of.compiled(grammars.whole(grammars.of_schema(CHEAP[case]), None, False, repr), "x")


def test_large_schemas_can_be_followed(grammars_of: Grammars, tiny_pack: Callable[..., Pack]) -> None:
    tokenizer, logits = Tokenizer.load(tiny_pack("llama")), np.zeros(tiny_pack("llama").config.vocab, np.float32)
    copy = grammars_of.compiled(schema(1000, required=False), "x").copy()
    for token in tokenizer.encode('{"p7": "x", "p99', special=False):
        assert np.isfinite(copy.allow(logits))[token]
        copy.accept(token)


def test_others_go_on_while_a_costly_one_is_tried(grammars_of: Grammars) -> None:
    own = grammars.whole(grammars.of_schema(grammars.ANY_OBJECT), None, False, repr)
    grammars_of.prepare([own])
    costly = [
        grammars.whole(grammars.of_schema({"type": "integer", "multipleOf": 1999957 + 2 * number}), None, False, repr)
        for number in range(3)
    ]
    refused = list[str]()

    def ask(lark: str) -> None:
        with pytest.raises(RequestError) as error:
            grammars_of.compiled(lark, "x")
        refused.append(str(error.value))

    threads = [Thread(target=ask, args=(lark,)) for lark in costly]
    for thread in threads:
        thread.start()
    assert grammars_of.cached(own) is not None  # at once, whatever the others do
    for thread in threads:
        thread.join()
    assert len(refused) == len(costly)


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("abc", 3),
        ("a{1000}", 1000),
        ("(a{1000}){1000}", 1_000_000),
        ("(ab|c{10}){2,3}d", 37),
        (r"[({\]]{5}\({2}\d{3,}", 10),
        ("{", 1),
        (")a{,7}", 7),
        ("((((a{10}){10}){10}){10}){10}", 100_000),
    ],
)
def test_counts_are_written_out(pattern: str, size: int) -> None:
    assert trial.expanded(pattern) == size

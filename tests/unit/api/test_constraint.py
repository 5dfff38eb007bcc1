"""Grammars: compiled once, copied for each answer, and refused where they would take long."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from master.api.answers import grammars
from master.api.answers.constraint import Grammars
from master.api.failures import RequestError
from master.text.tokenizer import Tokenizer
from tpi.pack.reader import Pack

_SECONDS = 4  # of processor time; what is refused takes a fifth of that where nothing else runs


@pytest.fixture(scope="module")
def grammars_of(tiny_pack: Callable[..., Pack]) -> Grammars:
    pack = tiny_pack("llama")
    return Grammars(Tokenizer.load(pack), pack.config.vocab)


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


def test_the_last_ones_are_kept_and_no_others(grammars_of: Grammars) -> None:
    def compiled(number: int) -> Any:
        return grammars_of.compiled(grammars.whole(grammars.of_pattern(f"x{{{number}}}"), None, False, repr), "x")

    first, second = compiled(1), compiled(2)
    for number in range(3, 17):
        compiled(number)
    assert compiled(1) is first
    compiled(17)
    assert compiled(1) is first
    assert compiled(2) is not second


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
    with pytest.raises(RequestError, match=r"^tools.*; ask for less$") as refused:
        grammars_of.compiled(schema(properties, required), "tools")
    assert time.thread_time() - begun < _SECONDS
    assert refused.value.field == "tools"

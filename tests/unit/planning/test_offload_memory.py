"""The memory model: the cases of appendix B by hand, and the total of a plan."""

from dataclasses import replace

import pytest

from scheduler.model.offload.memory import MemoryParts, Needs, chunk_tokens, peaks
from scheduler.model.offload.work import KvTier, Offload, Pipeline, Place, RequestPhase, Workload
from tests.support.devices.offload_cases import ATTENTION, FFN, MACHINE, layers, offload

LAYERS = 3
COUNT = 2 * LAYERS  # segments
TOKEN = 5  # bytes of a token's activations
KV = 2  # bytes of a token's keys and values in a layer
CONTEXT = 64  # tokens: two pages
WORK = layers(LAYERS, KV, head=1000)
REQUEST = Workload(prompt=40, answer=8, sequences=2, context=CONTEXT)
C = 2 * CONTEXT * KV * LAYERS  # PIPO's C: keys and values of all sequences and layers
CHUNK = 40
STREAMED = offload(["ram"] * COUNT, ["accelerator"] * COUNT)


def there(chosen: Offload, phase: RequestPhase) -> MemoryParts:
    """Return the most accelerator memory that one phase takes."""
    other = "decode" if phase == "prompt" else "prompt"
    alone = replace(chosen, **{other: ("host",) * COUNT})  # type: ignore[arg-type]
    return peaks(WORK, alone, REQUEST, Needs(TOKEN), CHUNK).accelerator


@pytest.mark.parametrize(("phase", "tokens"), [("prompt", CHUNK), ("decode", 2)])
@pytest.mark.parametrize(
    ("pipeline", "weights", "kv_layers"), [("performance", ATTENTION + FFN, 2), ("memory", FFN, 1)]
)
def test_appendix_b(pipeline: Pipeline, weights: int, kv_layers: int, phase: RequestPhase, tokens: int) -> None:
    """With preloading W_mha + W_mlp + 2C/l, without it the larger of both + C/l; activations of a chunk or token."""
    found = there(replace(STREAMED, pipeline=pipeline), phase)
    assert found.slots == weights
    assert found.kv == kv_layers * C // LAYERS
    assert found.activations == tokens * TOKEN
    assert found.total == weights + kv_layers * C // LAYERS + tokens * TOKEN


@pytest.mark.parametrize(("kv", "expected"), [("gpu", C), ("ram", 2 * C // LAYERS)])
def test_what_stays_is_added(kv: KvTier, expected: int) -> None:
    found = there(offload(["gpu"] * COUNT, kv=kv), "decode")
    assert (found.weights, found.slots, found.kv) == (LAYERS * (ATTENTION + FFN), 0, expected)


def test_nothing_is_there_where_the_host_computes() -> None:
    assert there(offload(["ram"] * COUNT), "decode") == MemoryParts()


def test_the_most_of_both_phases_counts_once() -> None:
    """Prompts copy FFN blocks, tokens copy attention: slots have the larger size."""
    ffn: list[Place] = ["host", "accelerator"] * LAYERS
    attention: list[Place] = ["accelerator", "host"] * LAYERS
    chosen = replace(STREAMED, prompt=tuple(ffn), decode=tuple(attention))
    found = peaks(WORK, chosen, REQUEST, Needs(TOKEN, 7), CHUNK)
    assert found.accelerator == MemoryParts(0, 2 * FFN, 2 * C // LAYERS, CHUNK * TOKEN, 0)
    assert found.host == MemoryParts(LAYERS * (ATTENTION + FFN), 0, C, CHUNK * TOKEN, 7 + 1000)


def test_ram_holds_what_comes_from_disk_in_slots() -> None:
    chosen = replace(offload(["disk"] * COUNT), head="disk")
    found = peaks(WORK, chosen, REQUEST, Needs(TOKEN), CHUNK)
    assert found.host.slots == FFN + ATTENTION + FFN
    assert found.host.other == 1000  # two tiles of a small head are the head
    assert peaks(WORK, replace(chosen, pipeline="memory"), REQUEST, Needs(TOKEN), CHUNK).host.slots == FFN


def test_a_chunk_is_modest_on_both_devices() -> None:
    assert MACHINE.accelerator is not None
    small = replace(MACHINE, accelerator=replace(MACHINE.accelerator, memory=8 * 100))
    long = Workload(prompt=4096)
    assert chunk_tokens(MACHINE, long, Needs(TOKEN)) == 512
    assert chunk_tokens(small, long, Needs(TOKEN)) == 16
    assert chunk_tokens(replace(small, memory=8), long, Needs(TOKEN)) == 1
    assert chunk_tokens(MACHINE, Workload(prompt=3, sequences=2), Needs(TOKEN)) == 6

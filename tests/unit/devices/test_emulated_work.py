"""The work of kernels, and its time, compared with figures worked out by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.devices.virtual_time import VirtualTime
from tests.support.kernels.expert_cases import experts_case
from tests.support.kernels.kernel_cases import attention_case, ffn_case, native
from tpi.devices.emulated import work
from tpi.devices.emulated.emulation import Emulation
from tpi.devices.emulated.machine import parse_emulated
from tpi.devices.emulated.work import KernelWork, Roofline
from tpi.devices.host import HostDevice
from tpi.kernels import Kernels
from tpi.kernels.spec import SHARED, ChainBlock, ExpertPiece, Residual, Routing

RANDOM = np.random.default_rng(1)


def test_bytes_or_operations_decide_and_activations_cross() -> None:
    rates = Roofline(memory=100, operations=1000, launch=0.5, up=10, down=20, latency=0.25)
    assert rates.seconds(KernelWork(200, 1000)) == 0.5 + 2
    assert rates.seconds(KernelWork(200, 3000)) == 0.5 + 3
    assert rates.seconds(KernelWork(200, 3000, up=10)) == 0.5 + 3 + 1.25
    assert rates.seconds(KernelWork(200, 3000, up=10, down=40)) == 0.5 + 3 + 1.25 + 2.25


def test_an_ffn_block_reads_its_weights_once_for_all_tokens() -> None:
    case = ffn_case(RANDOM, format="q4", hidden=64, units=3, width=32, tokens=5)  # gate, up and down of 96 neurons
    weights = 3 * 96 * 64
    assert work.ffn(case.spec, 5, None) == KernelWork(weights // 32 * 20, 2 * 5 * weights)
    assert work.ffn(case.spec, 5, None).nbytes == case.data.size
    third = work.ffn(case.spec, 5, np.arange(32, dtype=np.int32))
    assert (third.nbytes, third.operations) == pytest.approx((weights // 32 * 20 / 3, 2 * 5 * weights / 3))


def test_cut_experts_take_the_time_of_whole_ones_in_one_call() -> None:
    """Chosen experts count, and shared experts, which every token uses, count once."""
    case = experts_case(RANDOM, format="q4", hidden=64, experts=4, used=2, units=3, shared=2, tokens=5)
    routing = Routing(np.array([[0, 2]] * 4 + [[2, 3]], np.int32), np.ones((5, 2), np.float32))
    whole = work.experts(case.spec, 5, routing)
    parts = [
        ExpertPiece(0, 1),
        ExpertPiece(0, 2, False),
        ExpertPiece(1, 3),
        ExpertPiece(2, 2),
        ExpertPiece(2, 1, False),
    ]
    cut = replace(case.spec, pieces=(*parts, ExpertPiece(3, 3)))
    assert work.pieces(cut, [SHARED, *range(len(cut.pieces))], 5, routing) == whole
    unit, each = case.spec.routed.neuron.unit_bytes, 2.0 * 3 * 64 * 32  # operations of a token in a unit
    assert whole == KernelWork(unit * (3 * 3 + 2), each * (3 * (4 + 5 + 1) + 2 * 5))
    assert work.pieces(cut, [SHARED], 5, routing) == KernelWork(2 * unit, each * 2 * 5)


def test_attention_reads_weights_and_each_cache_once() -> None:
    lengths = ((10, 3), (0, 2))  # the first has 10 tokens in the cache
    case = attention_case(RANDOM, format="f32", hidden=64, heads=4, kv_heads=2, head_dim=16, lengths=lengths)
    spec, (keys, values) = case.spec, (case.kv.keys[0], case.kv.values[0])
    projecting = work.projecting(spec, 5)
    assert projecting == KernelWork((64 + 32 + 32) * 64 * 4, 2 * 5 * (64 + 32 + 32) * 64)
    pairs = (11 + 12 + 13) + (1 + 2)
    cached = (13 + 2) * 2 * (16 * 4)  # tokens, heads, bytes of a vector
    assert work.attending(spec, keys, values, case.batch) == KernelWork(2 * cached, 4 * pairs * 4 * 16)
    near = replace(spec, window=4)
    pairs, cached = (4 + 4 + 4) + (1 + 2), ((13 - 7) + 2) * 2 * (16 * 4)
    assert work.attending(near, keys, values, case.batch) == KernelWork(2 * cached, 4 * pairs * 4 * 16)


def test_a_q8_cache_is_counted_as_it_is_stored() -> None:
    case = attention_case(RANDOM, lengths=((6, 1),), kv_heads=2, head_dim=32, kv_dtype="q8")
    found = work.attending(case.spec, case.kv.keys[0], case.kv.values[0], case.batch)
    assert found.nbytes == 2 * 7 * 2 * (32 + 2)


def test_every_kernel_takes_its_time_and_keeps_the_bits() -> None:
    """Results have the host's bits. Nothing is copied, and the bytes decide the time."""
    time = VirtualTime()
    text = "1GiB,host_memory=1MB/s,host_flops=1P,launch=1s,stretch=1"
    emulated = Emulation(parse_emulated(text), real=time.real, sleep=time.sleep)
    kernels = emulated.host(HostDevice(native)).kernels
    case = ffn_case(RANDOM, hidden=64, units=2, tokens=3)
    x, run = case.x, case.spec.neuron
    each: dict[str, tuple[float, Callable[[Kernels], Any]]] = {
        "read": (case.data.size, lambda k: k.read(case.data)),
        "norm": (2 * x.nbytes, lambda k: k.norm(case.spec.norm, x)),
        "prepare": (2 * x.nbytes, lambda k: k.prepare(case.spec, x).values()),
        "ffn": (case.data.size, lambda k: k.ffn(case.spec, case.data, x)),
        "residual": (3 * x.nbytes, lambda k: k.add_residual(Residual(), x, x)),
        "dequantise": (case.data.size / 3, lambda k: k.dequantise(run, case.data, "up")),
    }
    for nbytes, call in each.values():
        before = emulated.processor.busy
        np.testing.assert_array_equal(call(kernels), call(native))
        assert emulated.processor.busy - before == pytest.approx(1 + nbytes / 1e6)
    assert emulated.processor.tasks == len(each)
    assert time.real() == pytest.approx(emulated.processor.busy)


def test_a_chain_is_its_blocks_and_says_when_each_ended() -> None:
    time = VirtualTime()
    emulated = Emulation(parse_emulated("1GiB,stretch=4"), real=time.real, sleep=time.sleep)
    host = emulated.host(HostDevice(native))
    attention, ffn = attention_case(RANDOM, lengths=((0, 2),)), ffn_case(RANDOM, tokens=2)
    blocks = [
        ChainBlock(attention.spec, attention.data, Residual(), attention.kv.keys[0], attention.kv.values[0]),
        ChainBlock(ffn.spec, ffn.data, Residual()),
    ]
    ended = np.zeros(2, np.int64)
    out = host.kernels.open_chain(blocks).run(attention.x, attention.batch, ended)
    np.testing.assert_array_equal(out, native.open_chain(blocks).run(attention.x, attention.batch))
    rates = Roofline(emulated.machine.host_memory, emulated.machine.host_flops, emulated.machine.launch)
    seconds = [rates.seconds(work.block(block, attention.batch)) for block in blocks]
    assert time.real() == pytest.approx(4 * sum(seconds))
    np.testing.assert_allclose(ended, np.cumsum(seconds) * 4e9, atol=1)

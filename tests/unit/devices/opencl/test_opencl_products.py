"""Norms, rounding, tables and chains on an OpenCL device against the reference."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.devices.opencl_device import assert_close, hold, holding
from tests.support.kernels.kernel_cases import PACKS, attention_case, ffn_case, norm_spec, normal, pack, tolerance
from tests.support.kernels.kernel_cases import reference as reference_kernels
from tests.support.kernels.pairwise import pairwise
from tpi.config import Format
from tpi.devices.opencl.compute.activations import Form, OpenClPrepared
from tpi.devices.opencl.device import OpenClDevice
from tpi.errors import DeviceError, KernelError
from tpi.kernels.arithmetic import round_activations
from tpi.kernels.chain import PlainChain
from tpi.kernels.spec import ChainBlock, NormSpec, Residual
from tpi.pack.layout import Layout, Part


@pytest.mark.parametrize("hidden", [1, 7, 64, 99, 700])
def test_norms(card: OpenClDevice, hidden: int) -> None:
    random = np.random.default_rng(1)
    x, without_bias = normal(random, 3, hidden), NormSpec("layer", 1e-5, normal(random, hidden))
    for norm in (norm_spec(random, "rms", hidden), norm_spec(random, "layer", hidden), without_bias):
        assert_close(card.kernels.norm(norm, x), reference_kernels.norm(norm, x), 1e-5)


@pytest.mark.parametrize("format", ["q8", "q4"])
def test_what_is_prepared_is_rounded_as_the_reference_rounds(card: OpenClDevice, format: Format) -> None:
    """Equal bits, for the device's own norm; some groups are zeros, and some have one large value."""
    case = ffn_case(np.random.default_rng(2), format=format, layout="record", hidden=160, tokens=5)
    case.x[1, 32:64] = 0.0
    case.x[2, 70] = 1e6
    prepared = card.kernels.prepare(case.spec, case.x)
    assert isinstance(prepared, OpenClPrepared)
    normed = prepared.values()
    assert_close(normed, reference_kernels.norm(case.spec.norm, case.x), 1e-5)
    expected = round_activations(normed, format)
    form = Form(fine=format == "q8", codes=False)
    rounded = prepared.card.download(prepared.activations.rounded(form).floats, *normed.shape)
    np.testing.assert_array_equal(rounded, expected)


@pytest.mark.parametrize(("packed", "tokens", "hidden"), pairwise(PACKS, [1, 7, 30], [224, 544]))
def test_logits(card: OpenClDevice, packed: tuple[Format, Layout], tokens: int, hidden: int) -> None:
    format, layout = packed
    random = np.random.default_rng(3)
    run, data = pack(random, "row", layout, [Part("row", format, "row")], 32, hidden, 5)
    x = normal(random, tokens, hidden)
    with holding(card, data) as (held,):
        actual = card.kernels.logits(run, held, x)
    assert_close(actual, reference_kernels.logits(run, data, x), tolerance(format))


@pytest.mark.parametrize(("format", "layout"), PACKS)
def test_gather_and_dequantise(card: OpenClDevice, format: Format, layout: Layout) -> None:
    random = np.random.default_rng(4)
    parts = [Part("row", format, "row"), Part("column", format, "column")]
    run, data = pack(random, "row", layout, parts, 32, 96, 3)
    rows = np.array([95, 0, 33, 33], np.int32)
    with holding(card, data) as (held,):
        expected = reference_kernels.gather(run, data, rows)
        np.testing.assert_allclose(card.kernels.gather(run, held, rows), expected, rtol=1e-6, atol=1e-7)
        for part in ("row", "column"):
            actual = card.kernels.dequantise(run, held, part)
            np.testing.assert_allclose(actual, reference_kernels.dequantise(run, data, part), rtol=1e-6, atol=1e-7)
        with pytest.raises(KernelError, match="outside"):
            card.kernels.gather(run, held, rows + np.int32(1))
        with pytest.raises(DeviceError, match="weights must lie"):
            card.kernels.gather(run, data, rows)


def test_a_chain_is_its_blocks_in_order(card: OpenClDevice) -> None:
    """Two steps of one chain, with each form of residual connection; the second step reads what the first wrote."""
    random = np.random.default_rng(5)
    first = attention_case(random, head_dim=32, lengths=((4, 3),))
    second = ffn_case(random, tokens=3)
    bias, norm = normal(random, 64), norm_spec(random, "rms", 64)
    residuals = (Residual(bias), Residual(bias, norm), Residual(None, norm, 0.5), Residual())
    keys, values = first.kv.keys[0], first.kv.values[0]
    blocks = [ChainBlock(first.spec, first.data, residuals[0], keys, values)]
    blocks += [ChainBlock(second.spec, second.data, each) for each in residuals[1:]]
    with pytest.raises(DeviceError, match="weights must lie"):
        card.kernels.open_chain(blocks)
    ended = np.zeros(len(blocks), np.int64)
    with holding(card, first.data, second.data, keys, values) as (one, other, held_keys, held_values):
        there = [replace(block, data=other) for block in blocks]
        there[0] = replace(blocks[0], data=one, keys=held_keys, values=held_values)
        chain, expected = card.kernels.open_chain(there), reference_kernels.open_chain(blocks)
        assert not isinstance(chain, PlainChain)
        for lap in (None, ended):
            assert_close(chain.run(first.x, first.batch, lap), expected.run(first.x, first.batch), 1e-5)
    assert 0 < ended[0] <= ended[1] <= ended[2] <= ended[3]


def test_it_says_what_it_is_and_reads(card: OpenClDevice) -> None:
    assert card.kernels.isa() == "opencl"
    card.kernels.set_threads(1)
    assert card.kernels.threads() >= 1
    with holding(card, np.ones(5000, np.uint8)) as (data,):
        card.kernels.read(data)
        card.kernels.read(data[:0])
    with pytest.raises(DeviceError, match="the data must lie"):
        card.kernels.read(np.ones(8, np.uint8))
    assert hold(card, np.empty(0, np.uint8)).size == 0

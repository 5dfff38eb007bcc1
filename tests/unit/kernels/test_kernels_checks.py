"""Arrays that a native kernel cannot take raise `KernelError`; nothing is read or written out of bounds."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.kernels.kernel_cases import AttentionCase, FfnCase, attention_case, ffn_case, native, pack
from tests.support.paths import ROOT
from tpi.errors import KernelError, UsageError
from tpi.kernels import open_kernels
from tpi.kernels.spec import Batch, NormSpec
from tpi.pack.layout import Part, RunLayout


@pytest.fixture
def attention() -> AttentionCase:
    return attention_case(np.random.default_rng(1), lengths=((3, 2), (0, 1)))


@pytest.fixture
def ffn() -> FfnCase:
    return ffn_case(np.random.default_rng(2), tokens=2)


def unaligned(array: Any) -> Any:
    """Return a contiguous copy whose data starts one byte off."""
    raw = np.zeros(array.nbytes + 1, np.uint8)
    copy = np.ndarray(array.shape, array.dtype, buffer=raw, offset=1)
    copy[...] = array
    return copy


WRONG_INPUTS: dict[str, Callable[[Any], Any]] = {
    "another dtype": lambda x: x.astype(np.float64),
    "another rank": lambda x: x[None],
    "another width": lambda x: np.ascontiguousarray(x[:, :-1]),
    "not contiguous": lambda x: np.asfortranarray(x),
    "every second": lambda x: np.repeat(x, 2, axis=0)[::2],
    "unaligned": unaligned,
    "byte order": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "a list": lambda x: x.tolist(),
}


@pytest.mark.parametrize("wrong", WRONG_INPUTS)
def test_wrong_x(wrong: str, attention: AttentionCase, ffn: FfnCase) -> None:
    with pytest.raises(KernelError):
        native.ffn(ffn.spec, ffn.data, _like(WRONG_INPUTS[wrong](ffn.x)))
    keys, values = attention.kv.keys[0], attention.kv.values[0]
    with pytest.raises(KernelError):
        native.attention(
            attention.spec, attention.data, _like(WRONG_INPUTS[wrong](attention.x)), keys, values, attention.batch
        )


class _Shaped(list[Any]):
    """A list with a shape, so that the wrapper reaches the check."""

    shape = (2, 64)


def _like(value: Any) -> Any:
    return _Shaped(value) if isinstance(value, list) else value


@pytest.mark.parametrize(
    "wrong",
    [lambda d: d[:-1], lambda d: np.append(d, np.uint8(0)), lambda d: d.view(np.int8), lambda d: d.reshape(2, -1)],
)
def test_wrong_weights(wrong: Callable[[Any], Any], attention: AttentionCase, ffn: FfnCase) -> None:
    with pytest.raises(KernelError):
        native.ffn(ffn.spec, wrong(ffn.data), ffn.x)
    keys, values = attention.kv.keys[0], attention.kv.values[0]
    with pytest.raises(KernelError):
        native.attention(attention.spec, wrong(attention.data), attention.x, keys, values, attention.batch)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda k: k.astype(np.float64),
        lambda k: np.ascontiguousarray(k[..., :-1]),
        lambda k: np.ascontiguousarray(k[:, :1]),
        lambda k: np.ascontiguousarray(k[:, :, :16]),
        lambda k: k[::2],
        lambda k: k.view(np.uint8),
    ],
)
def test_wrong_caches(wrong: Callable[[Any], Any], attention: AttentionCase) -> None:
    good = attention.kv.keys[0]
    for keys, values in ((wrong(good), good), (good, wrong(good))):
        with pytest.raises(KernelError):
            native.attention(attention.spec, attention.data, attention.x, keys, values, attention.batch)


def test_a_cache_that_cannot_be_written(attention: AttentionCase) -> None:
    keys = attention.kv.keys[0].copy()
    keys.flags.writeable = False
    with pytest.raises(KernelError, match="writable"):
        native.attention(attention.spec, attention.data, attention.x, keys, attention.kv.values[0], attention.batch)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda b: replace(b, positions=b.positions - 100),
        lambda b: replace(b, positions=b.positions + 100),
        lambda b: replace(b, positions=b.positions.astype(np.int64)),
        lambda b: replace(b, positions=b.positions[:-1]),
        lambda b: replace(b, sequence=b.sequence + 1),
        lambda b: replace(b, sequence=b.sequence - 1),
        lambda b: replace(b, tables=b.tables + 1000),
        lambda b: replace(b, tables=-1 - b.tables),
        lambda b: replace(b, tables=b.tables[0]),
    ],
)
def test_wrong_batches(wrong: Callable[[Batch], Batch], attention: AttentionCase) -> None:
    keys, values = attention.kv.keys[0], attention.kv.values[0]
    with pytest.raises(KernelError):
        native.attention(attention.spec, attention.data, attention.x, keys, values, wrong(attention.batch))


@pytest.mark.parametrize("active", [[-1], [96], [0, 1 << 30]])
def test_active_neurons_out_of_range(active: list[int], ffn: FfnCase) -> None:
    with pytest.raises(KernelError, match="outside"):
        native.ffn(ffn.spec, ffn.data, ffn.x, np.array(active, np.int32))


def test_active_neurons_of_a_tiled_pack() -> None:
    case = ffn_case(np.random.default_rng(3), format="q4")
    with pytest.raises(KernelError, match="record layout"):
        native.ffn(case.spec, case.data, case.x, np.array([0], np.int32))


def test_rows_out_of_range() -> None:
    run, data = pack(np.random.default_rng(4), "row", "record", [Part("row", "f32", "row")], 32, 16, 2)
    for rows in ([64], [-1]):
        with pytest.raises(KernelError, match="outside"):
            native.gather(run, data, np.array(rows, np.int32))
    with pytest.raises(KernelError, match="no part"):
        native.dequantise(run, data, "column")


@pytest.mark.parametrize(
    "change",
    [
        {"q_bias": np.zeros(3, np.float32)},
        {"kv_index": np.array([0, 0, 0, 2], np.int32)},
        {"kv_index": np.array([0, 0], np.int32)},
        {"norm": NormSpec("rms", 1e-5, np.zeros(63, np.float32))},
        {"inv_freq": np.zeros(9, np.float32)},
        {"heads": 5, "kv_index": np.zeros(5, np.int32)},
    ],
)
def test_specs_that_contradict_themselves(change: dict[str, Any], attention: AttentionCase) -> None:
    spec = replace(attention.spec, **change)
    keys, values = attention.kv.keys[0], attention.kv.values[0]
    with pytest.raises(KernelError):
        native.attention(spec, attention.data, attention.x, keys, values, attention.batch)


def test_layouts_that_do_not_fit_tiles() -> None:
    plain = RunLayout("row", "tiled", (Part("row", "f32", "row"),), 32, 64, 1)
    narrow = RunLayout("row", "tiled", (Part("row", "q4", "row"),), 12, 64, 1)
    for run in (plain, narrow):
        with pytest.raises(KernelError):
            native.logits(run, np.zeros(run.unit_bytes, np.uint8), np.zeros((1, 64), np.float32))


def test_no_tokens_and_no_units(attention: AttentionCase, ffn: FfnCase) -> None:
    assert native.ffn(ffn.spec, ffn.data, ffn.x[:0]).shape == (0, 64)
    empty = replace(ffn.spec, neuron=replace(ffn.spec.neuron, units=0))
    np.testing.assert_array_equal(native.ffn(empty, ffn.data[:0], ffn.x), np.zeros_like(ffn.x))
    batch = Batch(attention.batch.positions[:0], attention.batch.sequence[:0], attention.batch.tables)
    keys, values = attention.kv.keys[0], attention.kv.values[0]
    assert native.attention(attention.spec, attention.data, attention.x[:0], keys, values, batch).shape == (0, 64)


def test_weights_may_start_at_any_byte() -> None:
    case = ffn_case(np.random.default_rng(5), tokens=3)
    expected = native.ffn(case.spec, case.data, case.x)
    np.testing.assert_array_equal(native.ffn(case.spec, unaligned(case.data), case.x), expected)


def test_unknown_choices() -> None:
    with pytest.raises(KernelError, match="this machine has"):
        native.use_isa("mmx")
    with pytest.raises(KernelError, match="threads"):
        native.set_threads(0)
    with pytest.raises(UsageError, match="native, reference"):
        open_kernels("fortran")


def test_threads_that_cannot_start_are_said_and_the_pool_goes_on() -> None:
    """The system starts no more threads if address space for their stacks, or the number of processes, runs out."""
    code = """
import resource, sys
import numpy as np
from tpi.errors import KernelError
from tpi.kernels.native import NativeKernels
from tpi.kernels.spec import NormSpec
kernels = NativeKernels()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
kernels.set_threads(2)
resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), resource.RLIM_INFINITY))
resource.setrlimit(resource.RLIMIT_STACK, (64 << 20, resource.RLIM_INFINITY))
try:
    kernels.set_threads(1000)
except KernelError as error:
    print(error)
assert kernels.threads() == 1
x = np.ones((40, 4096), np.float32)
assert np.allclose(kernels.norm(NormSpec("rms", 0.0, x[0]), x), 1)
kernels.read(np.zeros(1 << 20, np.uint8))
kernels.set_threads(2)
kernels.read(np.zeros(1 << 20, np.uint8))
"""
    alone = {**os.environ, "LD_PRELOAD": ""}  # a sanitised thread that gets no memory ends the process
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=alone, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "does not start 1000 threads" in done.stdout
    assert "--threads" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_what_there_was_no_memory_to_prepare_is_not_used() -> None:
    code = """
import resource
import numpy as np
from tests.support.kernels.kernel_cases import ffn_case, native
from tpi.errors import KernelError
case = ffn_case(np.random.default_rng(1), format="f32", hidden=64, units=1, tokens=3)
prepared = native.prepare(case.spec, case.x)
x = np.zeros((1 << 17, 64), np.float32)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + x.nbytes // 2, resource.RLIM_INFINITY))
try:
    native.prepare(case.spec, x, prepared)
except MemoryError:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    try:
        native.ffn(case.spec, case.data, prepared)
    except KernelError as error:
        print(error)
"""
    alone = {**os.environ, "LD_PRELOAD": ""}  # a sanitiser's allocator ends the process in place of failing
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=alone, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "hidden size 0" in done.stdout

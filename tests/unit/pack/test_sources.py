"""Sources: values are read exactly, and hostile files are refused quickly, in little memory, with one sentence."""

import json
import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.models import TinyModel
from tpi.errors import ModelError
from tpi.pack.builder.build import open_source
from tpi.pack.library.locate import locate
from tpi.sources.base import read_vector
from tpi.sources.elements import decode
from tpi.sources.gguf import open_gguf
from tpi.sources.safetensors import open_safetensors, read_header


def header(**tensors: Any) -> bytes:
    """Return a safetensors header with these entries."""
    return framed(json.dumps(tensors).encode())


def framed(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def entry(first: int, last: int, shape: list[Any] | None = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(last - first) // 4] if shape is None else shape, "data_offsets": [first, last]}


HOSTILE_SAFETENSORS: dict[str, bytes] = {
    "empty": b"",
    "cut length": b"\x10\0\0",
    "huge length": struct.pack("<Q", 1 << 62) + b"{}",
    "length -1": b"\xff" * 8 + b"{}",
    "cut header": framed(b'{"a":')[:-2],
    "no json": framed(b"{nonsense}"),
    "not utf-8": framed(b'{"\xff\xfe": 1}'),
    "a list": framed(b"[]"),
    "a number": framed(b"7"),
    "deep": framed(b'{"a":' + b"[" * 50_000),
    "deep objects": framed(b'{"a":' * 30_000),
    "many zeros": framed(b'{"a":[' + b"0," * 3_000_000 + b"0]}"),
    "many objects": framed(b'{"a":[' + b"{}," * 2_000_000 + b"{}]}"),
    "100 MB": framed(b" " * (100 << 20)),
    "long number": framed(b'{"a":' + b"9" * 100_000 + b"}"),
    "duplicate": framed(
        b'{"a":' + json.dumps(entry(0, 4)).encode() + b',"a":' + json.dumps(entry(0, 4)).encode() + b"}"
    )
    + b"\0" * 4,
    "unknown dtype": header(a=entry(0, 4, dtype="F31")) + b"\0" * 4,
    "dtype of another kind": header(a=entry(0, 4, dtype=["F32"])) + b"\0" * 4,
    "negative shape": header(a=entry(0, 4, [-1])) + b"\0" * 4,
    "fractional shape": header(a=entry(0, 4, [1.0])) + b"\0" * 4,
    "true as shape": header(a=entry(0, 4, [True])) + b"\0" * 4,
    "overflowing shape": header(a=entry(0, 4, [1 << 33, 1 << 33])) + b"\0" * 4,
    "overflow to fit": header(a=entry(0, 4, [1 << 62, 4, 1])) + b"\0" * 4,
    "many dimensions": header(a=entry(0, 4, [1] * 1000)) + b"\0" * 4,
    "past the end": header(a=entry(0, 400)) + b"\0" * 4,
    "backwards": header(a={"dtype": "F32", "shape": [0], "data_offsets": [4, 0]}) + b"\0" * 4,
    "overlap": header(a=entry(0, 8), b=entry(4, 12)) + b"\0" * 12,
    "hole": header(a=entry(0, 4), b=entry(8, 12)) + b"\0" * 12,
    "trailing bytes": header(a=entry(0, 4)) + b"\0" * 8,
    "three offsets": header(a={"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}) + b"\0" * 4,
    "no offsets": header(a={"dtype": "F32", "shape": [1]}) + b"\0" * 4,
    "entry is a text": header(a="F32"),
}


def string(text: bytes | str) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def gguf(tensors: int, pairs: int, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + body + b"\0" * 64


def described(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def array(key: str, kind: int, count: int, body: bytes = b"") -> bytes:
    return string(key) + struct.pack("<IIQ", 9, kind, count) + body


MINUS_ONE = (1 << 64) - 1
HOSTILE_GGUF: dict[str, bytes] = {
    "empty": b"",
    "magic": b"GGML" + b"\0" * 60,
    "version 1": gguf(0, 0, version=1),
    "version 4": gguf(0, 0, version=4),
    "big-endian": gguf(0, 0, version=3 << 24),
    "cut": gguf(1, 1)[:20],
    "tensors -1": gguf(MINUS_ONE, 0),
    "pairs -1": gguf(0, MINUS_ONE),
    "pairs missing": gguf(0, 5),
    "string -1": gguf(0, 1, struct.pack("<Q", MINUS_ONE)),
    "string too long": gguf(0, 1, struct.pack("<Q", 1 << 40)),
    "array -1": gguf(0, 1, array("a", 4, MINUS_ONE)),
    "array of strings -1": gguf(0, 1, array("a", 8, MINUS_ONE)),
    "array of 2^25 strings": gguf(0, 1, array("a", 8, 1 << 25)),
    "array past the end": gguf(0, 1, array("a", 10, 1 << 24)),
    "nested array": gguf(0, 1, array("a", 9, 1, struct.pack("<IQ", 9, 1) * 1000)),
    "unknown type": gguf(0, 1, string("a") + struct.pack("<I", 77)),
    "array of unknown type": gguf(0, 1, array("a", 77, 2000)),
    "duplicate key": gguf(0, 2, (string("a") + struct.pack("<IB", 0, 1)) * 2),
    "duplicate tensor": gguf(2, 0, described("t", [8]) + described("t", [8], offset=32)),
    "alignment 0": gguf(0, 1, string("general.alignment") + struct.pack("<II", 4, 0)),
    "alignment a text": gguf(0, 1, string("general.alignment") + struct.pack("<I", 8) + string("x")),
    "split": gguf(0, 1, string("split.count") + struct.pack("<IH", 2, 3)),
    "shape overflows": gguf(1, 0, described("t", [1 << 62, 1 << 62])),
    "shape overflows to fit": gguf(1, 0, described("t", [1 << 32, 1 << 32, 1])),
    "shape of zero": gguf(1, 0, described("t", [0, 5])),
    "9 dimensions": gguf(1, 0, described("t", [1] * 9)),
    "no dimensions": gguf(1, 0, described("t", [])),
    "unknown tensor type": gguf(1, 0, described("t", [32], 99)),
    "half a group": gguf(1, 0, described("t", [40], 2)),
    "past the end": gguf(1, 0, described("t", [1 << 12])),
    "offset past the end": gguf(1, 0, described("t", [8], offset=1 << 50)),
    "overlap": gguf(2, 0, described("t", [16]) + described("u", [8], offset=32)),
    "hole": gguf(1, 0, described("t", [4], offset=32)),
    "100 MB of texts": gguf(0, 99, b"".join(string(f"{i}") + b"\x08\0\0\0" + string(b"x" * 10**6) for i in range(99))),
    "a million texts": gguf(0, 2, b"".join(array(f"{i}", 8, 600_000, b"\0" * 8 * 600_000) for i in range(2))),
    "many small arrays": gguf(0, 4000, b"".join(array(f"{i}", 0, 256, b"\0" * 256) for i in range(4000))),
}  # fmt: skip


def refused(call: Callable[[], object]) -> str:
    """Return the error of `call`, which must come within a second and in 64 MiB."""
    started = time.thread_time()
    with pytest.raises(ModelError) as caught:
        call()
    seconds = time.thread_time() - started
    tracemalloc.start()
    try:
        with pytest.raises(ModelError):
            call()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seconds < 1
    assert peak < 64 << 20
    assert len(str(caught.value)) < 500
    return str(caught.value)


@pytest.mark.parametrize("name", HOSTILE_SAFETENSORS)
def test_hostile_model_file_safetensors(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(HOSTILE_SAFETENSORS[name])
    assert str(path) in refused(lambda: open_safetensors(tmp_path))


@pytest.mark.parametrize("name", HOSTILE_GGUF)
def test_hostile_model_file_gguf(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(HOSTILE_GGUF[name])
    assert str(path) in refused(lambda: open_source(path))


def test_many_gguf_strings_are_refused_by_their_total(tmp_path: Path) -> None:
    texts = [string(f"key{number}") + struct.pack("<I", 8) + string(b"x" * (1 << 20)) for number in range(8)]
    (tmp_path / "model.gguf").write_bytes(gguf(0, 8, b"".join(texts)))
    assert "its strings together have more than 8388608 bytes" in refused(lambda: open_gguf(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "x\0y", "linked.safetensors", "gone"]
)
def test_index_does_not_lead_out_of_the_directory(name: str, tmp_path: Path) -> None:
    inner = tmp_path / "model"
    inner.mkdir()
    (tmp_path / "model.safetensors").write_bytes(header(a=entry(0, 4)) + b"\0" * 4)
    (inner / "linked.safetensors").symlink_to(tmp_path / "model.safetensors")
    (inner / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "model" in refused(lambda: open_safetensors(inner))


@pytest.mark.parametrize(
    "index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000, "nonsense"]
)
def test_hostile_model_file_index(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refused(lambda: open_safetensors(tmp_path))


_COUNT = (8 << 15) - 2  # values that a JSON file may have
# made when they are written: every process of the tests collects this file
HUGE_JSON: dict[str, Callable[[], bytes]] = {
    "many zeros": lambda: b'{"a":[' + b"0," * 3_000_000 + b"0]}",
    "many lists": lambda: b'{"a":[' + b"[]," * 2_000_000 + b"[]]}",
    "many objects": lambda: b'{"a":[' + b"{}," * 2_000_000 + b"{}]}",
    "many texts": lambda: b'{"a":[' + b'"ab",' * 2_000_000 + b'"ab"]}',
    "30 MB": lambda: b'{"a":"' + b"x" * (30 << 20) + b'"}',
    "one wide character": lambda: b'{"a":"' + "\U0001f600".encode() + b"x" * (8_000_000) + b'"}',
    "as many keys as there may be, then nonsense": lambda: (
        b"{" + b",".join(b'"%x":"%x"' % (i, i) for i in range(_COUNT)) + b"]"
    ),
    "wide keys, then nonsense": lambda: (
        "{" + ",".join(f'"{i:x}\U0001f600":"{i:x}\U0001f600"' for i in range(150_000)) + "]"
    ).encode(),
    "not UTF-8": lambda: b'{"a": "\xff"}',
    "deep": lambda: b'{"a":' + b"[" * 80_000,
}


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "model.safetensors"])
@pytest.mark.parametrize("name", HUGE_JSON)
def test_json_takes_no_more_memory_than_other_hostile_files(name: str, file: str, tmp_path: Path) -> None:
    text = HUGE_JSON[name]()
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (tmp_path / file).write_bytes(framed(text) if file == "model.safetensors" else text)
    assert file in refused(lambda: open_source(tmp_path))


def test_linked_single_file_is_refused_and_hub_snapshot_is_not(tmp_path: Path) -> None:
    data = header(a=entry(0, 4)) + b"\0" * 4
    for folder in ("blobs", "snapshots/1", "other"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "blobs" / "0").write_bytes(data)
    for folder in ("snapshots/1", "other"):
        (tmp_path / folder / "model.safetensors").symlink_to(tmp_path / "blobs" / "0")
    assert list(open_safetensors(tmp_path / "snapshots" / "1").tensors) == ["a"]
    assert "link" in refused(lambda: open_safetensors(tmp_path / "other"))


def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02}q\0.")
    (tmp_path / "config.json").write_text("{}")
    assert "convert the model to safetensors" in refused(lambda: open_safetensors(tmp_path))
    assert "convert the model to safetensors" in refused(lambda: locate(str(tmp_path / "pytorch_model.bin"), tmp_path))


def test_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).write_bytes(header(a=entry(0, 4)) + b"\0" * 4)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x", "b": "y"}}))
    assert "repeats tensor a" in refused(lambda: open_safetensors(tmp_path))


def test_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header(a=entry(0, 400)) + b"\0" * 400)
    with open_safetensors(tmp_path) as source:
        os.truncate(path, 300)
        with pytest.raises(ModelError, match="ends inside tensor a"):
            read_vector(source, "a")


def test_sharded_directory_holds_what_the_single_file_holds(tmp_path: Path) -> None:
    from tests.support.models import make_model

    made = make_model("llama", tmp_path, shard="200KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    weights = made.reference.state_dict()
    with open_safetensors(tmp_path) as source:
        assert set(source.tensors) == set(weights)
        for name, tensor in source.tensors.items():
            raw = source.read(tensor, (0, tensor.rows), (0, tensor.columns))
            np.testing.assert_array_equal(decode(tensor.element, raw).reshape(tensor.shape), weights[name].numpy())


@settings(max_examples=40, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q5_K", "Q6_K"]))
def test_any_rectangle_is_read_exactly(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: str
) -> None:
    rows, columns = data.draw(st.integers(1, 20)), 256 * data.draw(st.integers(1, 2))
    seed = data.draw(st.integers(0, 1 << 30))
    kind_number = GGMLQuantizationType[kind]
    raw = _random_blocks(kind, rows, columns, seed)
    path = tmp_path_factory.mktemp("rectangle") / "m.gguf"
    _write(path, {"t": (raw, kind_number)})
    with open_gguf(path) as source:
        tensor = source.tensors["t"]
        assert tensor.shape == (rows, columns)
        group = tensor.element.group
        first, last = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
        low, high = sorted(data.draw(st.tuples(*[st.integers(0, columns // group)] * 2)))
        got = decode(tensor.element, source.read(tensor, (first, last), (low * group, high * group)))
    whole = raw.astype(np.float32) if kind == "F16" else quants.dequantize(raw, kind_number)
    np.testing.assert_array_equal(got, whole.reshape(rows, columns)[first:last, low * group : high * group])


def test_narrow_columns_of_a_large_matrix(tmp_path: Path) -> None:
    values = np.arange(3000 * 1024, dtype=np.float32).reshape(3000, 1024)
    _write(tmp_path / "m.gguf", {"t": (values, GGMLQuantizationType.F32)})
    with open_gguf(tmp_path / "m.gguf") as source:
        tensor = source.tensors["t"]
        for low, high in ((32, 64), (512, 1024)):
            got = decode(tensor.element, source.read(tensor, (5, 2900), (low, high)))
            np.testing.assert_array_equal(got, values[5:2900, low:high])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_gguf_opens_or_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.getbasetemp()
    path = directory / "mutated.gguf"
    if not (directory / "small.gguf").exists():
        writer = GGUFWriter(directory / "small.gguf", "llama")
        writer.add_block_count(2)
        writer.add_token_list(["a", "b"])
        writer.add_tensor("t", np.zeros((4, 32), np.float32))
        writer.add_tensor("u", np.zeros(7, np.float32))
        _close(writer)
    raw = bytearray((directory / "small.gguf").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 400))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))])
    with suppress(ModelError):
        open_gguf(path).close()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_safetensors_opens_or_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    raw = bytearray(header(a=entry(0, 8), b=entry(8, 24)) + b"\0" * 24)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))])
    with suppress(ModelError):
        read_header(path)


def test_long_arrays_are_read_when_asked_for(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    tokens = [f"token {i} é" for i in range(5000)]
    writer.add_token_list(tokens)
    writer.add_token_scores([float(i) for i in range(5000)])
    writer.add_tensor("t", np.ones(8, np.float32))
    _close(writer)
    with open_gguf(tmp_path / "m.gguf") as source:
        assert source.array("tokenizer.ggml.tokens") == tokens
        assert source.array("tokenizer.ggml.scores")[4999] == 4999
        assert source.array("nothing") == []
        np.testing.assert_array_equal(read_vector(source, "t"), np.ones(8))


def test_model_that_is_not_there(tmp_path: Path, tiny_model: Callable[[str], TinyModel]) -> None:
    message = refused(lambda: locate("no-such-model", tmp_path))
    assert all(word in message for word in ("no-such-model", "smollm2-135m", ".gguf", "hub id"))
    assert "name one" not in refused(lambda: locate(str(tmp_path), tmp_path))
    file = tiny_model("llama").directory / "model.safetensors"
    assert "give its directory" in refused(lambda: locate(str(file), tmp_path))


def _random_blocks(kind: str, rows: int, columns: int, seed: int) -> np.ndarray[Any, Any]:
    """Return random bytes of GGML blocks with finite scales, or random values."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((rows, columns), np.float32)
    if kind == "F32":
        return values
    if kind == "F16":
        return values.astype(np.float16)
    if kind in ("Q5_K", "Q6_K"):
        group, size = 256, {"Q5_K": 176, "Q6_K": 210}[kind]
        raw = random.integers(0, 256, (rows, columns // group, size), np.uint8)
        scales = np.full((rows, columns // group, 1), 0.01, np.float16).view(np.uint8)
        for at in {"Q5_K": (0, 2), "Q6_K": (208,)}[kind]:
            raw[..., at : at + 2] = scales
        return raw.reshape(rows, -1)
    return np.asarray(quants.quantize(values, GGMLQuantizationType[kind]))


def _write(path: Path, tensors: dict[str, tuple[np.ndarray[Any, Any], GGMLQuantizationType]]) -> None:
    writer = GGUFWriter(path, "llama")
    for name, (raw, kind) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=None if raw.dtype != np.uint8 else kind)
    _close(writer)


def _close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

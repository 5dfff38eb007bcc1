"""The readers that are fuzzed, each with the well-formed inputs that are mutated."""

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from master.confined.process import ConfinedError, ConfinedProcess, Limits
from master.text.templates.template import MEMORY, SECONDS
from tests.support.cluster.cluster_helpers import MadeUpModel, step
from tests.support.fuzz.fuzz import Reader
from tests.support.fuzz.mutate import Parts
from tests.support.models import TEMPLATE
from tpi.errors import ModelError
from tpi.net.codec import decode, encode
from tpi.net.fields import Card, CardFigures, MachineSpeed, Profile, WindowState
from tpi.net.messages import Abort, Alive, Bye, Failure, Heartbeat, Hello, Join, PeerAddress, Ready, Refuse
from tpi.net.questions import (
    AskDisk,
    AskLink,
    AskSpans,
    AskStats,
    Condition,
    Echo,
    Inquiry,
    MeasuredDisk,
    MeasuredLink,
    Spans,
    Stats,
    Steady,
)
from tpi.net.transfers import Missing, Need, Offer, Unavailable, UnitData
from tpi.pack.builder.build import open_source
from tpi.sources.gguf import LongArray, open_gguf
from tpi.sources.safetensors import INDEX, SINGLE, open_safetensors, read_header

_MEMORY = Path("/dev/shm")
_CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32, "vocab_size": 40, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": True, "bos_token_id": 1,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 32},
}  # fmt: skip
_CALLS = """{%- for message in messages if message.content %}{{ loop.index0 ~ ': ' ~ message['content'] | trim }}
{%- if loop.last and add_generation_prompt %}{{ raise_exception('none') if messages | length > 9 else eos_token }}
{%- elif message.role in ['system', 'tool'] %}{{ message | tojson(indent=2) }}{% endif %}{% endfor %}
{%- macro shown(name, wide=8) %}{{ '%' ~ wide ~ 's' }}{{ name * 2 }}{% endmacro %}{{ shown('a'.join(['b', 'c'])) }}
{%- set ns = namespace(n=1) %}{% for i in range(3) %}{% set ns.n = ns.n * 2 %}{% endfor %}{{ ns.n ** 2 }}"""
_MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a lid?"}]


@contextmanager
def readers() -> Iterator[Sequence[Reader]]:
    """Yield all readers. Their files lie in memory if the system has a folder for that."""
    limits = Limits(SECONDS, MEMORY, SECONDS, MEMORY)
    renderer = ConfinedProcess("tests.support.fuzz.rendering", {"messages": _MESSAGES}, limits)
    with TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as name, closing(renderer):
        yield _readers(Path(name), renderer)


def _readers(folder: Path, renderer: ConfinedProcess) -> Sequence[Reader]:
    safetensors = _safetensors()
    directory = folder / "model"
    directory.mkdir()
    (directory / SINGLE).write_bytes(safetensors)
    return (
        Reader("codec", _messages(), decode, 0.3),
        Reader("gguf", ((_gguf(),),), lambda parts: _read_gguf(folder / "m.gguf", parts), 0.2),
        Reader(
            "safetensors", ((safetensors,),), lambda parts: _read_safetensors(folder / "m.safetensors", parts), 0.15
        ),
        Reader("index", ((_index(),),), lambda parts: _read_index(directory, parts), 0.15),
        Reader("config", ((json.dumps(_CONFIG).encode(),),), lambda parts: _read_config(directory, parts), 0.1),
        Reader("template", ((TEMPLATE.encode(),), (_CALLS.encode(),)), partial(_render, renderer), 0.1),
    )


def _messages() -> tuple[Parts, ...]:
    model = MadeUpModel()
    peers = tuple(PeerAddress(rank, f"node{rank}", "tcp://10.0.0.1:9991", bytes(32)) for rank in (0, 1))
    figures, speed = CardFigures(*[1e9] * len(fields(CardFigures))), MachineSpeed(*[1e9] * len(fields(MachineSpeed)))
    card = Card("emu", 1 << 30, "ram", "gpu", "auto", 0, (1 << 29,), figures)
    profile = Profile("lap", "Linux", 4, 2, 1 << 33, 1 << 32, 0, 1 << 25, 1 << 34, card, speed)
    steady = Steady(0.5, 0.5, 0.5, 0.5, 0.5, True, False, True, 0.25, 2, 0, 1 << 20, 0, 0.5, 0.5)
    messages = [
        model.split(7, 1, peers, 8)[1], step(7, 1, 3), Bye(7), Alive(7), Abort(7, 1),
        Join("0.1.0", 7, "desk"), Failure(7, 1, "b", "it broke"), Ready(7, 1, 8, 64, 1, 2, 3),
        Heartbeat(7, 1, 5, "compute", 3, WindowState(1, 2, 3)), Need(bytes(32), "query", 0, 4),
        UnitData(bytes(32), "query", 0, 4, memoryview(bytes(64))), Offer(7), Missing(7, 1, 4, 64),
        Unavailable(bytes(32), "it is not in the plan"), Refuse("0.1.0", 7, "in use", "desk"),
        Hello("0.1.0", 7, "lap", 9991, 9992, profile), Inquiry(7, ("10.0.0.1:9991", "[::1]:9992")),
        Condition(7, "0.1.0", "lap", "desk", 3.5, 1.7e9, 9991, 9992, profile, ("10.0.0.1:9991",)), Echo(7, bytes(64)),
        AskStats(7, 1, True),
        Stats(7, 1, 5, 9, 1, 2, 3, 4, 0.5, 0.25, 0.75, 0.125, 1, 0.5, 2, 3, 0, steady, "emu holds all"),
        AskLink(7, 1, 5, 1, 0.5, peers), MeasuredLink(7, 1, 5, 0.001, 1e8),
        AskDisk(7, 1), MeasuredDisk(7, 1, 1e8),
        AskSpans(7, 1, 0, 9), Spans(7, 1, 5, 0, ("step", "read"), np.arange(8, dtype=np.int64).reshape(2, 4)),
    ]  # fmt: skip
    return tuple(tuple(bytes(frame) for frame in encode(message)) for message in messages)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _gguf() -> bytes:
    """Return a GGUF file whose metadata describe a llama of one layer, with tensors of all types."""
    numbers = {"block_count": 1, "embedding_length": 32, "attention.head_count": 2, "feed_forward_length": 32,
               "context_length": 64}  # fmt: skip
    pairs = [_string("general.architecture") + struct.pack("<I", 8) + _string("llama")]
    pairs += [_string(f"llama.{key}") + struct.pack("<II", 4, number) for key, number in numbers.items()]
    pairs.append(_string("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5))
    pairs.append(_string("tokenizer.ggml.model") + struct.pack("<I", 8) + _string("llama"))
    pairs.append(_string("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 300) + _string("token") * 300)
    pairs.append(_string("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 300) + bytes(4 * 300))
    tensors, offset, data = [], 0, b""
    for name, rows, kind, row_bytes in (("token_embd.weight", 40, 0, 128), ("blk.0.attn_q.weight", 32, 8, 34)):
        tensors.append(_string(name) + struct.pack("<IQQIQ", 2, 32, rows, kind, offset))
        data += bytes(rows * row_bytes) + bytes(-rows * row_bytes % 32)
        offset = len(data)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs + tensors)
    return head + bytes(-len(head) % 32) + data


def _safetensors() -> bytes:
    entries = {
        "model.embed_tokens.weight": {"dtype": "F32", "shape": [40, 16], "data_offsets": [0, 2560]},
        "model.norm.weight": {"dtype": "BF16", "shape": [16], "data_offsets": [2560, 2592]},
        "__metadata__": {"format": "pt"},
    }
    head = json.dumps(entries).encode()
    return struct.pack("<Q", len(head)) + head + bytes(2592)


def _index() -> bytes:
    names = {"model.embed_tokens.weight": SINGLE, "model.norm.weight": SINGLE}
    return json.dumps({"metadata": {"total_size": 2592}, "weight_map": names}).encode()


def _read_gguf(path: Path, parts: Parts) -> None:
    path.write_bytes(parts[0])
    with suppress(ModelError), open_gguf(path) as source:  # the metadata of files that are no models, too
        for key, found in source.metadata.items():
            source.array(key) if isinstance(found, LongArray) else source.text(key)
    open_source(path).source.close()


def _read_safetensors(path: Path, parts: Parts) -> None:
    path.write_bytes(parts[0])
    read_header(path)


def _read_index(directory: Path, parts: Parts) -> None:
    (directory / INDEX).write_bytes(parts[0])
    open_safetensors(directory).close()


def _read_config(directory: Path, parts: Parts) -> None:
    (directory / INDEX).unlink(missing_ok=True)
    (directory / "config.json").write_bytes(parts[0])
    open_source(directory).source.close()


def _render(renderer: ConfinedProcess, parts: Parts) -> None:
    """Render a template as `ChatTemplate` does, in one process for all sources."""
    try:
        renderer.ask(parts[0].decode(errors="replace"))
    except ConfinedError as error:
        raise ModelError(str(error)) from error

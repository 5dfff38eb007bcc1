"""A random model of a Llama shape as a GGUF file, so that llama.cpp and TPI read the very same weights."""

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

_BYTES = 256
_SPECIAL = ("<unk>", "<s>", "</s>")


def write_gguf(path: Path, shape: dict[str, object], kind: str = "Q4_0", seed: int = 0) -> Path:
    """Write `shape` (keys of a Hugging Face config.json) with matrices quantised to `kind`, once.

    The tokenizer is a SentencePiece-like one with byte tokens, so that any prompt has ids.
    """
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama", use_temp_file=True)
    _write_metadata(writer, shape)
    quantised = getattr(gguf.GGMLQuantizationType, kind)
    random = np.random.default_rng(seed)
    for name, size in tensors(shape):
        if len(size) == 1:
            writer.add_tensor(name, np.ones(size, np.float32))
            continue
        matrix = random.standard_normal(size, np.float32) * np.float32(size[-1] ** -0.5)
        writer.add_tensor(name, gguf.quants.quantize(matrix, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
    return path


def tensors(shape: dict[str, object]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of a Llama GGUF."""
    number = {key: int(value) for key, value in shape.items() if isinstance(value, int)}
    hidden, inner, head = number["hidden_size"], number["intermediate_size"], number["head_dim"]
    q, kv = number["num_attention_heads"] * head, number["num_key_value_heads"] * head
    yield "token_embd.weight", (number["vocab_size"], hidden)
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (number["vocab_size"], hidden)
    for layer in range(number["num_hidden_layers"]):
        yield f"blk.{layer}.attn_norm.weight", (hidden,)
        yield f"blk.{layer}.attn_q.weight", (q, hidden)
        yield f"blk.{layer}.attn_k.weight", (kv, hidden)
        yield f"blk.{layer}.attn_v.weight", (kv, hidden)
        yield f"blk.{layer}.attn_output.weight", (hidden, q)
        yield f"blk.{layer}.ffn_norm.weight", (hidden,)
        yield f"blk.{layer}.ffn_gate.weight", (inner, hidden)
        yield f"blk.{layer}.ffn_up.weight", (inner, hidden)
        yield f"blk.{layer}.ffn_down.weight", (hidden, inner)


def _write_metadata(writer: gguf.GGUFWriter, shape: dict[str, object]) -> None:
    number = {key: int(value) for key, value in shape.items() if isinstance(value, int)}
    writer.add_name("random")
    writer.add_context_length(number["max_position_embeddings"])
    writer.add_embedding_length(number["hidden_size"])
    writer.add_block_count(number["num_hidden_layers"])
    writer.add_feed_forward_length(number["intermediate_size"])
    writer.add_head_count(number["num_attention_heads"])
    writer.add_head_count_kv(number["num_key_value_heads"])
    writer.add_rope_dimension_count(number["head_dim"])
    writer.add_layer_norm_rms_eps(float(str(shape["rms_norm_eps"])))
    writer.add_rope_freq_base(float(str(shape["rope_theta"])))
    writer.add_vocab_size(number["vocab_size"])
    _write_tokenizer(writer, number["vocab_size"])


def _write_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    bytes_ = [f"<0x{value:02X}>" for value in range(_BYTES)]
    words = [f"▁w{index}" for index in range(vocab - _BYTES - len(_SPECIAL))]
    kinds = gguf.TokenType
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL] + [kinds.BYTE] * _BYTES + [kinds.NORMAL] * len(words)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*_SPECIAL, *bytes_, *words])
    writer.add_token_scores([0.0] * (vocab - len(words)) + [-float(index) for index in range(len(words))])
    writer.add_token_types([int(kind) for kind in types])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)

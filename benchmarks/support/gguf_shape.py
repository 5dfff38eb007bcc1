"""A random model of a Llama or OLMoE shape as a GGUF file, so that llama.cpp and TPI read the very same weights."""

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

_BYTES = 256
_DIFFERENT = 4  # experts of a layer; the others are copies, which take as long to read and less to make
_SPECIAL = ("<unk>", "<s>", "</s>")
ROUTER = "ffn_gate_inp.weight"


def write_gguf(path: Path, shape: dict[str, object], kind: str = "Q4_0", seed: int = 0) -> Path:
    """Write `shape` (keys of a Hugging Face config.json) with matrices quantised to `kind`, once.

    The tokenizer is a SentencePiece-like one with byte tokens, so that any prompt has ids.
    """
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "olmoe" if "num_experts" in shape else "llama", use_temp_file=True)
    _write_metadata(writer, shape)
    quantised = getattr(gguf.GGMLQuantizationType, kind)
    random = np.random.default_rng(seed)
    for name, size in tensors(shape):
        if len(size) == 1:
            writer.add_tensor(name, np.ones(size, np.float32))
            continue
        made = size if len(size) == 2 else (min(_DIFFERENT, size[0]), *size[1:])
        matrix = random.standard_normal(made, np.float32) * np.float32(size[-1] ** -0.5)
        if name.endswith(ROUTER):
            writer.add_tensor(name, matrix)
            continue
        coded = gguf.quants.quantize(matrix, quantised)
        writer.add_tensor(name, np.resize(coded, (size[0], *coded.shape[1:])), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
    return path


def tensors(shape: dict[str, object]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the tensors of a Llama GGUF, or of an OLMoE GGUF if `shape` has experts."""
    number = {key: int(value) for key, value in shape.items() if isinstance(value, int)}
    hidden, head = number["hidden_size"], number["head_dim"]
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
        for name, size in _ffn(number, q, kv):
            yield f"blk.{layer}.{name}", size


def _ffn(number: dict[str, int], q: int, kv: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the feed-forward tensors of a layer, and the norms of queries and keys that OLMoE has."""
    experts, inner, hidden = number.get("num_experts"), number["intermediate_size"], number["hidden_size"]
    stack, suffix = ((experts,), "_exps") if experts else ((), "")
    if experts:
        yield "attn_q_norm.weight", (q,)
        yield "attn_k_norm.weight", (kv,)
        yield ROUTER, (experts, hidden)
    yield f"ffn_gate{suffix}.weight", (*stack, inner, hidden)
    yield f"ffn_up{suffix}.weight", (*stack, inner, hidden)
    yield f"ffn_down{suffix}.weight", (*stack, hidden, inner)


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
    if "num_experts" in number:
        writer.add_expert_count(number["num_experts"])
        writer.add_expert_used_count(number["num_experts_per_tok"])
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

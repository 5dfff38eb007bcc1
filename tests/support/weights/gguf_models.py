"""Writer of the tiny models of `tests.support.models` as GGUF files, as llama.cpp's converter writes them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, quants

from tests.support.models import TEMPLATE, TinyModel

Array = npt.NDArray[Any]

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.qkv_proj.weight": "attn_qkv.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.gate_up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
} | {f"self_attn.{part}_proj.{kind}": f"attn_{part}.{kind}" for part in "qkv" for kind in ("weight", "bias")}
_GEMMA = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}


def gguf_tensors(model: TinyModel, family: str) -> dict[str, Array]:
    """Return float32 weights by GGUF names: rotary pairs interleaved for llama-like models, 1 + w for gemma."""
    config = model.reference.config
    gemma = family in ("gemma2", "gemma3")
    names = _NAMES | (_GEMMA if gemma else {})
    found = {}
    for name, tensor in model.reference.state_dict().items():
        values = tensor.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if gemma and "norm" in name:
            values = values + 1
        if family in ("llama", "smollm3", "granite") and (".q_proj." in name or ".k_proj." in name):
            values = interleave(values, config.hidden_size // config.num_attention_heads)
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        found[f"blk.{layer}.{names[rest]}" if name.startswith("model.layers.") else names[name]] = values
    return found


def interleave(rows: Array, head_dim: int) -> Array:
    """Return the rows with both halves of each head interleaved, as GGUF stores q and k of llama."""
    return np.asarray(rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape))


def write_gguf(
    path: Path,
    model: TinyModel,
    family: str,
    kind: Callable[[str], str] = lambda name: "F32",
    extra: Mapping[str, Array] | None = None,
    vocabulary: Callable[[GGUFWriter], None] = lambda writer: None,
    split: int = 0,
) -> None:
    """Write a model of architecture `family`; `kind(name)` is the GGML type of each matrix, vectors stay F32.

    With `split`, write several files of `split` tensors each: for `m.gguf` m-00001-of-00003.gguf and so on.
    """
    config = model.reference.config
    writer = GGUFWriter(path, family, split_max_tensors=split)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    theta = config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"]
    writer.add_rope_freq_base(theta)
    _add_own(writer, family, config)
    vocabulary(writer)
    write_tensors(writer, gguf_tensors(model, family) | dict(extra or {}), kind)


def _add_own(writer: GGUFWriter, family: str, config: Any) -> None:
    """Add the metadata that only some architectures have."""
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        writer.add_rope_scaling_factor(config.rope_parameters["full_attention"]["factor"])
        writer.add_float32(f"{family}.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"])
    if family == "granite":
        writer.add_logit_scale(config.logits_scaling)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_multiplier)


def write_tensors(
    writer: GGUFWriter, tensors: Mapping[str, Array], kind: Callable[[str], str], floats: Sequence[str] = ()
) -> None:
    """Write all tensors and close the file: matrices as `kind(name)`; vectors, and tensors in `floats`, as F32."""
    for name, values in tensors.items():
        matrix = values.ndim > 1 and not any(part in name for part in floats)
        _add(writer, name, values, kind(name) if matrix else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def encoded(values: Array, kind: str) -> Array:
    """Return `values` in a GGML type: an array of values, or of the bytes of blocks."""
    if kind in ("F32", "F16"):
        return values.astype(np.float32 if kind == "F32" else np.float16)
    if kind in ("Q4_K", "Q6_K"):
        return _k_quant(values, kind)
    return np.asarray(quants.quantize(np.ascontiguousarray(values, np.float32), GGMLQuantizationType[kind]))


def decoded(values: Array, kind: str) -> Array:
    """Return the float32 values that a matrix has after it was written as `kind`."""
    raw = encoded(values, kind)
    return raw.astype(np.float32) if kind in ("F32", "F16") else quants.dequantize(raw, GGMLQuantizationType[kind])


def byte_level_vocabulary(
    directory: Path, pre: str | None = "gpt-2", template: str | list[dict[str, str]] = TEMPLATE
) -> Callable[[GGUFWriter], None]:
    """Return a function that writes the tokenizer.json of `directory` as a GGUF vocabulary."""
    import json

    model = json.loads((directory / "tokenizer.json").read_text())
    tokens = sorted(model["model"]["vocab"], key=model["model"]["vocab"].__getitem__)
    special = {token["content"] for token in model["added_tokens"]}

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in special else 1 for token in tokens])
        writer.add_token_merges([" ".join(merge) for merge in model["model"]["merges"]])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(template)

    return write


def sentencepiece_tokens(text: str) -> list[str]:
    """Return a SentencePiece-like vocabulary trained on `text`: special tokens, 256 bytes, pieces by rank."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    vocab = json.loads(tokenizer.to_str())["model"]["vocab"]
    return sorted([*vocab, "the"], key=lambda token: vocab.get(token, len(vocab)))


def sentencepiece_vocabulary(tokens: list[str], prefix: bool) -> Callable[[GGUFWriter], None]:
    """Return a function that writes `tokens` as a SentencePiece vocabulary; `prefix` adds a space to every text."""

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(rank) for rank in range(len(tokens))])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_space_prefix(prefix)

    return write


def _add(writer: GGUFWriter, name: str, values: Array, kind: str) -> None:
    raw = encoded(values, kind)
    writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind] if raw.dtype == np.uint8 else None)


def _k_quant(values: Array, kind: str) -> Array:
    """Return random valid blocks of a K-quant for as many values: the gguf package can only decode K-quants."""
    size = {"Q4_K": 144, "Q6_K": 210}[kind]
    random = np.random.default_rng(len(values))
    raw = random.integers(0, 256, (len(values), values.shape[1] // 256, size), np.uint8)
    scale = np.full(1, 0.002, np.float16).view(np.uint8)
    for at in {"Q4_K": (0, 2), "Q6_K": (208,)}[kind]:
        raw[..., at : at + 2] = scale
    return raw.reshape(len(values), -1)

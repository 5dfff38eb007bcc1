"""Models that benchmarks make themselves: random weights in a real shape, as a Hugging Face directory or a GGUF."""

import json
from pathlib import Path

import numpy as np

LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The 1.1B Llama shape of docs/benchmarks.md (TinyLlama's)."""


def write_huggingface(path: Path, shape: dict[str, object], seed: int = 0) -> Path:
    """Write a Hugging Face directory of random float32 weights, one file per layer, unless it exists; return it.

    The tokenizer is byte-level, with the first 256 ids.
    """
    from safetensors.numpy import save_file

    if (path / "model.safetensors.index.json").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(shape))
    random = np.random.default_rng(seed)
    index: dict[str, str] = {}
    for file, shapes in tensor_files(shape).items():
        tensors = {name: _random(random, size) for name, size in shapes.items()}
        save_file(tensors, path / file)
        index |= dict.fromkeys(tensors, file)
    write_byte_tokenizer(path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return path


def write_byte_tokenizer(path: Path) -> None:
    """Write a tokenizer.json whose tokens are the 256 bytes to `path`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: rank for rank, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))


def _random(random: np.random.Generator, size: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    if len(size) == 1:
        return np.ones(size, np.float32)
    matrix: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = random.standard_normal(size, np.float32)
    matrix *= np.float32(size[-1] ** -0.5)
    return matrix


def tensor_files(shape: dict[str, object]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of tensors by file: one file per layer, and one for the rest."""
    hidden, inner, vocab = (int(str(shape[key])) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    head_dim = int(str(shape["head_dim"]))
    q, kv = (int(str(shape[key])) * head_dim for key in ("num_attention_heads", "num_key_value_heads"))
    files: dict[str, dict[str, tuple[int, ...]]] = {
        "ends.safetensors": {
            "model.embed_tokens.weight": (vocab, hidden),
            "model.norm.weight": (hidden,),
            "lm_head.weight": (vocab, hidden),
        }
    }
    for layer in range(int(str(shape["num_hidden_layers"]))):
        name = f"model.layers.{layer}."
        files[f"layer-{layer:03}.safetensors"] = {
            name + "self_attn.q_proj.weight": (q, hidden),
            name + "self_attn.k_proj.weight": (kv, hidden),
            name + "self_attn.v_proj.weight": (kv, hidden),
            name + "self_attn.o_proj.weight": (hidden, q),
            name + "mlp.gate_proj.weight": (inner, hidden),
            name + "mlp.up_proj.weight": (inner, hidden),
            name + "mlp.down_proj.weight": (hidden, inner),
            name + "input_layernorm.weight": (hidden,),
            name + "post_attention_layernorm.weight": (hidden,),
        }
    return files

"""Random GGUF models: every metadata key of an architecture is present or absent, with usual and with odd values."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

from tests.support.differential import gguf_expert_draws as experts
from tests.support.weights.gguf_models import Array, decoded, encoded

# Each is drawn as often as every other.
NAMES = (
    "llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "smollm3", "granite", "gemma", "arcee", "seed_oss",
    "ernie4_5", "mistral3", "olmo2", "exaone4", "hunyuan-dense", *experts.ARCHITECTURES,
)  # fmt: skip
_UNSLIDING = (
    "gemma",
    "arcee",
    "seed_oss",
    "ernie4_5",
    "mistral3",
    "exaone4",
    "hunyuan-dense",
)  # which refuse a sliding window
VOCAB = 40
Random = np.random.Generator


@dataclass(frozen=True)
class Draw:
    """A model: its metadata without the architecture's prefix, and its tensors with their GGML types."""

    name: str
    keys: dict[str, Any]
    tensors: dict[str, Array]
    kinds: dict[str, str]

    @property
    def architecture(self) -> str:
        """The architecture that its file names."""
        return experts.ARCHITECTURES.get(self.name, self.name)

    @property
    def values(self) -> dict[str, Array]:
        """The values of the tensors after decoding."""
        return {name: decoded(values, self.kinds[name]) for name, values in self.tensors.items()}

    def write(self, path: Path) -> None:
        """Write the model as a GGUF file at `path`."""
        writer = GGUFWriter(path, self.architecture)
        for key, value in self.keys.items():
            kind = GGUFValueType.get_type(value) if not isinstance(value, int) or isinstance(value, bool) else None
            writer.add_key_value(f"{self.architecture}.{key}", value, kind or GGUFValueType.UINT32)
        for name, values in self.tensors.items():
            raw = encoded(values, self.kinds[name])
            writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[self.kinds[name]])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def draw(random: Random, name: str) -> Draw:
    """Return a random model of one of `NAMES`; most values are such as a converter could have written."""
    sizes = _sizes(random)
    if name == "exaone4" and random.random() < 0.2:
        sizes["block_count"] = 64  # with which llama.cpp slides
    keys = dict(sizes)
    for key, (chance, value) in _OPTIONAL.items():
        if random.random() < (0.6 if key in _OWN.get(name, ()) else chance):
            keys[key] = value(random, sizes)
    if name.startswith("granite") and random.random() < 0.97:
        keys["logit_scale"] = _pick(random, 0.5, 4.0)
    if name == "mistral3":
        keys |= {"attention.temperature_scale": _pick(random, 0.0, 0.1, 0.5)}
        keys |= {"rope.scaling.original_context_length": _pick(random, 2, 4, 16)}
    if name in _UNSLIDING and sizes["block_count"] < 64 and random.random() < 0.9:
        keys.pop("attention.sliding_window", None)
    keys = _completed(random, sizes, keys)
    keys = experts.completed(random, name, keys) if name in experts.ARCHITECTURES else keys
    tensors = weights(random, name, keys)
    size = experts.rotated(name, keys, keys.get("attention.key_length", _default_size(sizes)))
    tensors |= _further(random, name, tensors, keys.get("rope.dimension_count", size) // 2)
    if random.random() < 0.03:
        del keys[str(random.choice([key for key in sizes if key in keys]))]
    if random.random() < 0.05:
        keys.setdefault(str(random.choice(_UNKNOWN)), _pick(random, 1, 0.5, 7))
    return Draw(name, keys, tensors, {tensor: _kind(random, tensor, values) for tensor, values in tensors.items()})


def _pick(random: Random, *values: Any) -> Any:
    return values[int(random.integers(len(values)))]


def _sizes(random: Random) -> dict[str, Any]:
    heads = _pick(random, 2, 4)
    return {
        "block_count": _pick(random, 1, 2, 3, 4),
        "context_length": _pick(random, 48, 64, 128),
        "embedding_length": _pick(random, 32, 64),
        "feed_forward_length": _pick(random, 24, 32, 64),
        "attention.head_count": heads,
        "attention.layer_norm_rms_epsilon": _pick(random, 1e-6, 1e-5, 0.1),
    }


Value = Callable[[Random, dict[str, Any]], Any]


def _of(*values: Any) -> Value:
    return lambda random, sizes: _pick(random, *values)


def _rarely(odd: Any, *values: Any) -> Value:
    """Return a draw of usual values, and rarely of the `odd` values, which mean something else."""
    return lambda random, sizes: odd if random.random() < 0.06 else _pick(random, *values)


def _default_size(sizes: dict[str, Any]) -> int:
    return int(sizes["embedding_length"] // sizes["attention.head_count"])


def _pattern(random: Random, sizes: dict[str, Any]) -> Any:
    listed = [bool(random.integers(2)) for _ in range(sizes["block_count"])]
    return _pick(random, 0, 1, 2, 3, listed)


# key -> how often it is there, and its value
_OPTIONAL: dict[str, tuple[float, Value]] = {
    "attention.head_count_kv": (0.7, lambda random, sizes: _pick(random, 1, 2, sizes["attention.head_count"])),
    "attention.key_length": (0.4, _of(8, 16, 24)),
    "attention.value_length": (0.0, _of(0)),  # follows the key's: see `_completed`
    "attention.scale": (0.2, _of(0.0, 0.1, 0.5)),
    "attention.sliding_window": (0.3, _of(0, 3, 7, 4096)),
    "attention.sliding_window_pattern": (0.02, _pattern),
    "attention.causal": (0.2, _rarely(False, True)),
    "attention.clamp_kqv": (0.1, _rarely(8.0, 0.0)),
    "attention.max_alibi_bias": (0.1, _rarely(8.0, 0.0)),
    "attn_logit_softcapping": (0.12, _of(0.0, 0.0, 0.0, 2.0)),
    "final_logit_softcapping": (0.12, _of(0.0, 0.0, 0.0, 2.0)),
    "logit_scale": (0.1, _rarely(0.5, 0.0, 1.0)),
    "residual_scale": (0.1, _rarely(0.5, 0.0, 1.0)),
    "embedding_scale": (0.1, _rarely(12.0, 0.0, 1.0)),
    "use_parallel_residual": (0.1, _rarely(True, False)),
    "expert_count": (0.1, _rarely(2, 0)),
    "expert_used_count": (0.1, _rarely(2, 0)),
    "nextn_predict_layers": (0.1, _rarely(1, 0)),
    "pooling_type": (0.1, _rarely(1, 0)),
    "vocab_size": (0.4, _of(VOCAB, VOCAB + 8)),
    "tensor_data_layout": (0.1, _of("Meta AI original pth")),
    "rope.dimension_count": (0.6, lambda random, sizes: _pick(random, 4, _default_size(sizes))),
    "rope.freq_base": (0.6, _of(100.0, 10000.0, 1e6)),
    "rope.freq_base_swa": (0.02, _of(100.0, 10000.0, 1e6)),
    "rope.scale_linear": (0.15, _of(0.0, 1.0, 4.0)),
    "rope.scaling.type": (0.5, _rarely("llama3", "none", "linear", "yarn", "yarn")),
    "rope.scaling.factor": (0.4, _rarely(-1.0, 0.0, 0.5, 4.0, 32.0)),
    "rope.scaling.attn_factor": (0.2, _of(0.8, 1.19)),
    "rope.scaling.alpha": (0.1, _rarely(100.0, 0.0)),
    "rope.scaling.original_context_length": (0.3, _of(16, 32)),
    "rope.scaling.finetuned": (0.2, _of(True, False)),
    "rope.scaling.yarn_ext_factor": (0.15, _of(-1.0, 0.0, 0.5, 1.0)),
    "rope.scaling.yarn_attn_factor": (0.12, _of(1.0, 1.0, 1.3)),
    "rope.scaling.yarn_beta_fast": (0.2, _of(8.0, 32.0)),
    "rope.scaling.yarn_beta_slow": (0.2, _of(0.5, 1.0)),
    "rope.scaling.yarn_log_multiplier": (0.15, _of(0.0, 0.7)),
}
_GEMMA3 = (
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.freq_base_swa",
    "final_logit_softcapping",
)
_OWN = {  # keys that mean more to an architecture than to others
    "gemma2": ("attn_logit_softcapping", *_GEMMA3[1:]),
    "gemma3": _GEMMA3,
    "granite": ("embedding_scale", "residual_scale", "rope.scaling.finetuned"),
    "granitemoe": ("embedding_scale", "residual_scale", "rope.scaling.finetuned"),
    "gpt-oss": ("attention.sliding_window_pattern",),
    "olmo2": _GEMMA3[:2],
}
_UNKNOWN = ("attention.output_scale", "attention.temperature_length", "rope.dimension_sections", "swin_norm",
            "attention.layer_norm_epsilon", "ssm.state_size", "brand_new")  # fmt: skip
KEYS = (*_OPTIONAL, *experts.KEYS, "block_count", "context_length", "embedding_length", "feed_forward_length",
        "attention.head_count", "attention.layer_norm_rms_epsilon")  # fmt: skip


def _completed(random: Random, sizes: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Return `keys` with the keys that depend on others, which rarely do not fit."""
    size = keys.get("attention.key_length", _default_size(sizes))
    fitting: dict[str, Any] = {}
    if random.random() < 0.3:
        fitting["attention.value_length"] = size if random.random() < 0.95 else size + 8
    if "rope.dimension_count" in keys and random.random() < 0.7:
        fitting["rope.dimension_count"] = size
    if "rope.freq_base_swa" in keys and random.random() < 0.7:
        fitting["rope.freq_base_swa"] = keys.get("rope.freq_base", 10000.0)
    return keys | fitting


def weights(random: Random, architecture: str, keys: dict[str, Any]) -> dict[str, Array]:
    """Return the tensors that an architecture needs for its metadata."""
    size = keys.get("attention.key_length", _default_size(keys))
    query = keys["attention.head_count"] * size
    kv = keys.get("attention.head_count_kv", keys["attention.head_count"]) * size
    hidden, inner = keys["embedding_length"], keys["feed_forward_length"]
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, hidden), "output_norm.weight": (hidden,)}
    usual = _rows(architecture, hidden, inner, query, kv) | _norms(architecture, hidden, query, kv, size)
    routed = architecture in experts.ARCHITECTURES
    dense = experts.dense(random, architecture, keys) if routed else keys["block_count"]
    for layer in range(keys["block_count"]):
        block = {f"{name}.weight": shape for name, shape in usual.items()}
        if routed and layer < dense:
            norms = {f"{experts.NORMS.get(architecture, 'ffn_norm')}.weight": (hidden,)}
            ffn = {f"ffn_{part}.weight": usual[f"ffn_{part}"] for part in ("gate", "up", "down")}
            block = {name: shape for name, shape in block.items() if not name.startswith("ffn_")}
            block = experts.attention(architecture, keys, block, size) | ffn | norms
        elif routed:
            block = experts.block(random, architecture, keys, usual, size)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
        if architecture == "qwen2":
            shapes |= {f"blk.{layer}.attn_{name}.bias": usual[f"attn_{name}"][:1] for name in "qkv"}
    return {name: _values(random, shape) for name, shape in shapes.items()}


def _further(random: Random, architecture: str, tensors: dict[str, Array], pairs: int) -> dict[str, Array]:
    """Return optional tensors: biases, a head, divisors of frequencies, and rarely a tensor that no model has."""
    matrices = [name for name, values in tensors.items() if name.startswith("blk.") and values.ndim == 2]
    kinds = {name.split(".")[2] for name in matrices}
    biased = {kind for kind in sorted(kinds) if random.random() < (0.35 if kind in _biased(architecture) else 0.005)}
    names = [name for name in matrices if name.split(".")[2] in biased]
    found = {name.replace("weight", "bias"): _values(random, tensors[name].shape[:1]) for name in names}
    if random.random() < 0.5:
        found["output.weight"] = _values(random, tensors["token_embd.weight"].shape)
    if random.random() < 0.01:
        found["blk.0.attn_sinks.weight"] = _values(random, (4,))
    return found | _factors(random, architecture, pairs)


def _biased(architecture: str) -> tuple[str, ...]:
    """Return the names of the matrices that may have a bias."""
    attention = () if architecture == "deepseek2" else ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output")
    return (*attention, "ffn_gate", "ffn_up", "ffn_down")


def _rows(architecture: str, hidden: int, inner: int, query: int, kv: int) -> dict[str, tuple[int, ...]]:
    rows: dict[str, tuple[int, ...]] = {"attn_output": (hidden, query), "ffn_down": (hidden, inner)}
    if architecture == "phi3":
        return rows | {"attn_qkv": (query + 2 * kv, hidden), "ffn_up": (2 * inner, hidden)}
    rows |= {"attn_q": (query, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)}
    if architecture == "arcee":
        return rows | {"ffn_up": (inner, hidden)}
    return rows | {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden)}


def _norms(architecture: str, hidden: int, query: int, kv: int, size: int) -> dict[str, tuple[int, ...]]:
    if architecture in ("olmo2", "exaone4"):
        after: dict[str, tuple[int, ...]] = dict.fromkeys(("post_attention_norm", "post_ffw_norm"), (hidden,))
        lengths = (query, kv) if architecture == "olmo2" else (size, size)
        return after | {f"attn_{part}_norm": (length,) for part, length in zip("qk", lengths, strict=True)}
    names = ["attn_norm", "post_attention_norm" if architecture == "seed_oss" else "ffn_norm"] + (
        ["post_attention_norm", "post_ffw_norm"] if architecture in ("gemma2", "gemma3") else []
    )
    heads = (
        ["attn_q_norm", "attn_k_norm"] if architecture in ("qwen3", "gemma3", "hunyuan-dense", "hunyuan-moe") else []
    )
    return {**dict.fromkeys(names, (hidden,)), **dict.fromkeys(heads, (size,))}


def _factors(random: Random, architecture: str, pairs: int) -> dict[str, Array]:
    """Return tensors with divisors of the rotary frequencies."""
    chance = random.random()
    if architecture == "phi3" and chance < 0.5:
        names = ["rope_factors_short.weight", "rope_factors_long.weight"]
    else:
        names = ["rope_freqs.weight"] if chance < (0.02 if architecture in ("gemma3", "olmo2") else 0.2) else []
    return {name: random.uniform(1, 4, pairs).astype(np.float32) for name in names if pairs}


def _values(random: Random, shape: tuple[int, ...]) -> Array:
    if len(shape) == 1:
        return np.asarray(1 + 0.3 * random.standard_normal(shape), np.float32)
    return np.asarray(random.standard_normal(shape) * shape[-1] ** -0.5, np.float32)


def _kind(random: Random, name: str, values: Array) -> str:
    """Return a random GGML type for a tensor; F32 for vectors and routers."""
    if values.ndim == 1 or "ffn_gate_inp" in name or name.endswith("bias"):
        return "F32"
    return str(_pick(random, "F32", "F16", "BF16", *(("Q4_0", "Q4_1", "Q8_0") if values.shape[-1] % 32 == 0 else ())))

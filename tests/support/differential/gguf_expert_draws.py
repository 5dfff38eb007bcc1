"""Metadata and tensor shapes that random GGUF models with experts have in addition to other models."""

from typing import Any

import numpy as np

ARCHITECTURES = {  # by the names of draws
    "mixtral": "llama", "qwen2moe": "qwen2moe", "qwen3moe": "qwen3moe", "olmoe": "olmoe", "dbrx": "dbrx",
    "granitemoe": "granitemoe", "gpt-oss": "gpt-oss", "deepseek2": "deepseek2", "glm4moe": "glm4moe",
    "minimax-m2": "minimax-m2", "ernie4_5-moe": "ernie4_5-moe", "hunyuan-moe": "hunyuan-moe",
}  # fmt: skip
Random = np.random.Generator
Keys = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

NORMS = {"gpt-oss": "post_attention_norm", "dbrx": "attn_output_norm", "glm4moe": "post_attention_norm"}
_CLIPS = ("olmoe", "dbrx")
_SLIDES = ("mixtral", "gpt-oss")
_EPS, _OTHER_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_SHARED = ("qwen2moe", "deepseek2", "glm4moe", "ernie4_5-moe", "granitemoe", "hunyuan-moe")
_CHOICE = ("deepseek2", "glm4moe", "minimax-m2", "ernie4_5-moe")  # whose choice may have a bias
_DENSE = ("qwen2moe", "qwen3moe", "deepseek2", "glm4moe", "ernie4_5-moe")  # some of whose layers may have no experts

# key -> how often it is there, and its values
_OPTIONAL: dict[str, tuple[float, tuple[Any, ...]]] = {
    "expert_feed_forward_length": (0.6, (24, 32, 40)),
    "expert_weights_norm": (0.3, (True, False)),
    "expert_weights_scale": (0.3, (0.0, 1.0, 0.5, 2.5)),
    "expert_gating_func": (0.35, (0, 1, 1, 2, 2, 3)),
    "expert_group_count": (0.2, (0, 1, 1)),
    "expert_group_used_count": (0.2, (0, 1, 1, 2)),
    "expert_shared_count": (0.2, (0,)),
    "expert_shared_feed_forward_length": (0.2, (0,)),
    "leading_dense_block_count": (0.2, (0,)),
}
_ODD: Keys = {
    "expert_weights_norm": 1, "expert_gating_func": 4, "expert_shared_count": 3, "expert_used_count": 9,
    "expert_shared_feed_forward_length": 56, "leading_dense_block_count": 4, "expert_group_count": 2,
}  # fmt: skip
_SCALING = (
    "rope.scale_linear",
    *(f"rope.scaling.{key}" for key in ("factor", "attn_factor", "yarn_attn_factor", "yarn_ext_factor")),
)
KEYS = (*_OPTIONAL, "expert_count", "expert_used_count", "attention.clamp_kqv")
OWN_KEYS = (
    "attention.q_lora_rank",
    "attention.kv_lora_rank",
    "attention.key_length_mla",
    "attention.value_length_mla",
    _OTHER_EPS,
)
TENSORS = (
    *(f"ffn_{part}_exps.{kind}" for part in ("gate", "up", "down") for kind in ("weight", "bias")),
    *(f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")),
    "ffn_gate_inp.bias", "ffn_gate_inp_shexp.weight", "exp_probs_b.bias", "attn_sinks.weight", "attn_kv_b.weight",
    "attn_k_b.weight", "attn_v_b.weight", "attn_q_a.weight", "attn_q_a_norm.weight", "attn_q_b.weight",
)  # fmt: skip


def completed(random: Random, name: str, keys: Keys) -> Keys:
    """Return `keys` plus the keys of a model with experts, mostly as its converter could have written them."""
    found = {key: value for key, value in keys.items() if not key.startswith("expert_")}
    found |= {"expert_count": _pick(random, 4, 6, 8), "expert_used_count": _pick(random, 1, 2, 3)}
    for key, (chance, values) in _OPTIONAL.items():
        if random.random() < chance:
            found[key] = _ODD[key] if key in _ODD and random.random() < 0.02 else _pick(random, *values)
    if random.random() < (0.5 if name == "deepseek2" else 0.08):
        found |= {"expert_gating_func": 2, "expert_group_count": 2, "expert_group_used_count": 1,
                  "expert_used_count": _pick(random, 1, 2)}  # fmt: skip
    if name not in _SLIDES and random.random() < 0.9:
        found.pop("attention.sliding_window", None)
    if name in _CLIPS:
        found["attention.clamp_kqv"] = _pick(random, 0.0, 0.3, 1.0)
    if name == "dbrx":
        found[_OTHER_EPS] = found.pop(_EPS)
    if name in ("qwen2moe", "deepseek2"):
        found |= {"expert_shared_count": 1, "expert_shared_feed_forward_length": _pick(random, 0, 24, 40)}
    if name == "gpt-oss":
        found["attention.sliding_window"] = _pick(random, 0, 3, 7)
    if name == "hunyuan-moe":
        width = found["feed_forward_length"]
        found |= {"expert_shared_count": 1, "expert_shared_feed_forward_length": _pick(random, 0, 24, width)}
        found |= {"expert_feed_forward_length": width if random.random() < 0.9 else 40}
    if name in ("glm4moe", "ernie4_5-moe", "granitemoe"):
        found |= _mixed(random, name, found["block_count"])
    return _latent(random, found) if name == "deepseek2" else found


def _mixed(random: Random, name: str, layers: int) -> Keys:
    """Return keys of families with or without shared experts; `layers` include layers that predict further tokens."""
    width = _pick(random, 24, 32)
    if name == "granitemoe":
        return {"expert_shared_feed_forward_length": _pick(random, 0, 24, 40)}
    dense = {"leading_dense_block_count": _pick(random, 0, 1), "expert_feed_forward_length": width}
    if name == "glm4moe":
        return dense | {
            "expert_shared_count": _pick(random, 0, 1, 2),
            "nextn_predict_layers": _pick(random, 0, int(layers > 1)),
        }
    shared = _pick(random, 0, 1, 2)
    lengths = {"expert_shared_count": shared, "expert_shared_feed_forward_length": shared * width}
    return dense | lengths | {"interleave_moe_layer_step": 1}


def _latent(random: Random, keys: Keys) -> Keys:
    """Return `keys` plus the sizes of heads that come from a latent vector, in the older or the newer form.

    Mostly add a scaling that TPI and llama.cpp agree on.
    """
    rank, rope, own, value = (_pick(random, *sizes) for sizes in ((16, 24), (4, 8), (8, 12), (8, 12)))
    heads, newer = keys["attention.head_count"], random.random() < 0.5
    found = {key: value for key, value in keys.items() if key != "expert_shared_feed_forward_length"}
    found |= {
        "attention.kv_lora_rank": rank, "rope.dimension_count": rope, "attention.key_length": own + rope,
        "attention.value_length": value, "attention.head_count_kv": heads, "expert_shared_count": _pick(random, 1, 2),
        "expert_feed_forward_length": _pick(random, 24, 32), "leading_dense_block_count": _pick(random, 0, 1),
    }  # fmt: skip
    if random.random() < 0.6:
        found["attention.q_lora_rank"] = _pick(random, 12, 16, 0)
    if newer:
        found |= {
            "attention.head_count_kv": 1, "attention.key_length": rank + rope, "attention.value_length": rank,
            "attention.key_length_mla": own + rope, "attention.value_length_mla": value,
        }  # fmt: skip
    if random.random() < 0.9:
        found = {key: value for key, value in found.items() if key not in _SCALING}
        if random.random() < 0.6:
            found |= {"rope.scaling.type": "yarn", "rope.scaling.factor": _pick(random, 4.0, 40.0),
                      "rope.scaling.yarn_log_multiplier": _pick(random, 0.0707, 0.1)}  # fmt: skip
    return found


def rotated(name: str, keys: Keys, size: int) -> int:
    """Return the number of a head's values that are rotated: from the metadata for DeepSeek, else `size`."""
    return int(keys["rope.dimension_count"]) if name == "deepseek2" else size


def dense(random: Random, name: str, keys: Keys) -> int:
    """Return the number of leading layers without experts."""
    if name in ("deepseek2", "glm4moe", "ernie4_5-moe"):
        return int(keys["leading_dense_block_count"])
    return int(name in _DENSE and random.random() < 0.3)


def block(random: Random, name: str, keys: Keys, usual: Shapes, size: int) -> Shapes:
    """Return a layer's tensors in place of the `usual` ones; names end with `.weight` or `.bias`."""
    hidden = keys["embedding_length"]
    kept = {f"{tensor}.weight": shape for tensor, shape in usual.items() if not tensor.startswith("ffn_")}
    norm = NORMS.get(name, "ffn_norm")
    found = attention(name, keys, kept, size) | {f"{norm}.weight": (hidden,)}
    found |= _routed(name, keys) | (_shared(name, keys) if name in _SHARED else {})
    if name in _CHOICE and (name != "deepseek2" or keys.get("expert_gating_func") == 2) and random.random() < 0.8:
        found["exp_probs_b.bias"] = (keys["expert_count"],)
    return found


def attention(name: str, keys: Keys, usual: Shapes, size: int) -> Shapes:
    """Return the tensors of a layer's attention in place of the `usual` ones."""
    if name == "deepseek2":
        return _latent_attention(keys) | {"attn_norm.weight": usual["attn_norm.weight"]}
    if name == "dbrx":
        rows = sum(usual.pop(f"attn_{part}.weight")[0] for part in "qkv")
        return usual | {"attn_qkv.weight": (rows, keys["embedding_length"])}
    if name in ("olmoe", "qwen3moe", "minimax-m2", "glm4moe"):
        whole = {part: usual[f"attn_{part}.weight"][0] for part in "qk"}
        norms = whole if name in ("olmoe", "minimax-m2") else dict.fromkeys("qk", size)
        return usual | {f"attn_{part}_norm.weight": (length,) for part, length in norms.items()}
    return usual | ({"attn_sinks.weight": (keys["attention.head_count"],)} if name == "gpt-oss" else {})


def _latent_attention(keys: Keys) -> Shapes:
    hidden, heads = keys["embedding_length"], keys["attention.head_count"]
    rank, rope = keys["attention.kv_lora_rank"], keys["rope.dimension_count"]
    newer = "_mla" if "attention.key_length_mla" in keys else ""
    size, value = keys[f"attention.key_length{newer}"], keys[f"attention.value_length{newer}"]
    own: Shapes = {"attn_q.weight": (heads * size, hidden)}
    if q_rank := keys.get("attention.q_lora_rank"):
        own = {"attn_q_a.weight": (q_rank, hidden), "attn_q_a_norm.weight": (q_rank,),
               "attn_q_b.weight": (heads * size, q_rank)}  # fmt: skip
    found: Shapes = own | {
        "attn_kv_a_mqa.weight": (rank + rope, hidden),
        "attn_kv_a_norm.weight": (rank,), "attn_output.weight": (hidden, heads * value),
    }  # fmt: skip
    if newer:
        return found | {"attn_k_b.weight": (heads, rank, size - rope), "attn_v_b.weight": (heads, value, rank)}
    return found | {"attn_kv_b.weight": (heads * (size - rope + value), rank)}


def _routed(name: str, keys: Keys) -> Shapes:
    """Return the tensors of a router, and the stacks of its experts."""
    hidden, experts, width = keys["embedding_length"], keys["expert_count"], _width(name, keys)
    found: Shapes = {
        "ffn_gate_inp.weight": (experts, hidden), "ffn_gate_exps.weight": (experts, width, hidden),
        "ffn_up_exps.weight": (experts, width, hidden), "ffn_down_exps.weight": (experts, hidden, width),
    }  # fmt: skip
    if name == "gpt-oss":
        found |= {tensor.replace("weight", "bias"): shape[:2] for tensor, shape in found.items() if "exps" in tensor}
        found["ffn_gate_inp.bias"] = (experts,)
    return found


def _shared(name: str, keys: Keys) -> Shapes:
    hidden = keys["embedding_length"]
    if name in ("qwen2moe", "hunyuan-moe"):
        width = keys.get("expert_shared_feed_forward_length") or keys["feed_forward_length"]
    elif name in ("granitemoe", "ernie4_5-moe"):
        width = keys["expert_shared_feed_forward_length"]
    else:
        width = keys["expert_shared_count"] * keys["expert_feed_forward_length"]
    if not width:
        return {}
    found: Shapes = {"ffn_gate_shexp.weight": (width, hidden), "ffn_up_shexp.weight": (width, hidden)}
    gate: Shapes = {"ffn_gate_inp_shexp.weight": (hidden,)} if name == "qwen2moe" else {}
    return found | gate | {"ffn_down_shexp.weight": (hidden, width)}


def _width(name: str, keys: Keys) -> int:
    share = max(keys["feed_forward_length"] // keys["expert_used_count"], 1)
    usual = share if name.startswith("qwen") else keys["feed_forward_length"]
    return int(keys.get("expert_feed_forward_length") or usual)


def _pick(random: Random, *values: Any) -> Any:
    return values[int(random.integers(len(values)))]

"""The families: tensor names and what differs from Llama. Adding one that differs in names alone takes a few lines."""

from typing import Any

from tpi.errors import ModelError
from tpi.families.base import Family, Fields, Names, activation, number, whole

_LLAMA_ATTENTION = {
    "norm": "layers.{i}.input_layernorm.weight",
    "q": "layers.{i}.self_attn.q_proj.weight",
    "k": "layers.{i}.self_attn.k_proj.weight",
    "v": "layers.{i}.self_attn.v_proj.weight",
    "o": "layers.{i}.self_attn.o_proj.weight",
    "q.bias": "layers.{i}.self_attn.q_proj.bias?",
    "k.bias": "layers.{i}.self_attn.k_proj.bias?",
    "v.bias": "layers.{i}.self_attn.v_proj.bias?",
    "o.bias": "layers.{i}.self_attn.o_proj.bias?",
}
_QWEN2_ATTENTION = _LLAMA_ATTENTION | {
    f"{part}.bias": f"layers.{{i}}.self_attn.{part}_proj.bias" for part in ("q", "k", "v")
}
_QWEN3_ATTENTION = _LLAMA_ATTENTION | {
    "q_norm": "layers.{i}.self_attn.q_norm.weight",
    "k_norm": "layers.{i}.self_attn.k_norm.weight",
}
_PHI3_ATTENTION = {
    "norm": "layers.{i}.input_layernorm.weight",
    "q": "layers.{i}.self_attn.qkv_proj.weight[q]",
    "k": "layers.{i}.self_attn.qkv_proj.weight[k]",
    "v": "layers.{i}.self_attn.qkv_proj.weight[v]",
    "o": "layers.{i}.self_attn.o_proj.weight",
}
_LLAMA_FFN = {
    "norm": "layers.{i}.post_attention_layernorm.weight",
    "gate": "layers.{i}.mlp.gate_proj.weight",
    "up": "layers.{i}.mlp.up_proj.weight",
    "down": "layers.{i}.mlp.down_proj.weight",
    "gate.bias": "layers.{i}.mlp.gate_proj.bias?",
    "up.bias": "layers.{i}.mlp.up_proj.bias?",
    "down.bias": "layers.{i}.mlp.down_proj.bias?",
}
_PHI3_FFN = {
    "norm": "layers.{i}.post_attention_layernorm.weight",
    "gate": "layers.{i}.mlp.gate_up_proj.weight[gate]",
    "up": "layers.{i}.mlp.gate_up_proj.weight[up]",
    "down": "layers.{i}.mlp.down_proj.weight",
}
_GEMMA2_ATTENTION = _LLAMA_ATTENTION | {"post_norm": "layers.{i}.post_attention_layernorm.weight"}
_GEMMA2_FFN = _LLAMA_FFN | {
    "norm": "layers.{i}.pre_feedforward_layernorm.weight",
    "post_norm": "layers.{i}.post_feedforward_layernorm.weight",
}
_OPT_ATTENTION = {
    "norm": "layers.{i}.self_attn_layer_norm.weight",
    "norm.bias": "layers.{i}.self_attn_layer_norm.bias",
    "q": "layers.{i}.self_attn.q_proj.weight",
    "k": "layers.{i}.self_attn.k_proj.weight",
    "v": "layers.{i}.self_attn.v_proj.weight",
    "o": "layers.{i}.self_attn.out_proj.weight",
    "q.bias": "layers.{i}.self_attn.q_proj.bias?",
    "k.bias": "layers.{i}.self_attn.k_proj.bias?",
    "v.bias": "layers.{i}.self_attn.v_proj.bias?",
    "o.bias": "layers.{i}.self_attn.out_proj.bias?",
}
_OPT_FFN = {
    "norm": "layers.{i}.final_layer_norm.weight",
    "norm.bias": "layers.{i}.final_layer_norm.bias",
    "up": "layers.{i}.fc1.weight",
    "down": "layers.{i}.fc2.weight",
    "up.bias": "layers.{i}.fc1.bias?",
    "down.bias": "layers.{i}.fc2.bias?",
}
_GGUF_ATTENTION = {
    "norm": "blk.{i}.attn_norm.weight",
    "q": "blk.{i}.attn_q.weight",
    "k": "blk.{i}.attn_k.weight",
    "v": "blk.{i}.attn_v.weight",
    "o": "blk.{i}.attn_output.weight",
    "q.bias": "blk.{i}.attn_q.bias?",
    "k.bias": "blk.{i}.attn_k.bias?",
    "v.bias": "blk.{i}.attn_v.bias?",
    "o.bias": "blk.{i}.attn_output.bias?",
}
_GGUF_FFN = {
    "norm": "blk.{i}.ffn_norm.weight",
    "gate": "blk.{i}.ffn_gate.weight",
    "up": "blk.{i}.ffn_up.weight",
    "down": "blk.{i}.ffn_down.weight",
}


def _llama_names(attention: dict[str, str], ffn: dict[str, str]) -> Names:
    final = {"norm": "norm.weight"}
    return Names("embed_tokens.weight", attention, ffn, final, "lm_head.weight", prefixes=("model.", ""))


def _gguf_names(attention: dict[str, str], ffn: dict[str, str]) -> Names:
    return Names("token_embd.weight", attention, ffn, {"norm": "output_norm.weight"}, "output.weight")


def _windows(fields: Fields, sliding: list[bool], default: int | None = None) -> dict[str, Any]:
    """`windows` from the sliding layers; `sliding_window` may be missing (the family's default) or null (none)."""
    if fields.get("sliding_window", default) is None or not any(sliding):
        return {}
    window = whole(fields, "sliding_window", default)
    return {"windows": tuple(window if slides else 0 for slides in sliding)}


def _listed(fields: Fields, otherwise: list[bool]) -> list[bool]:
    """Which layers slide: by `layer_types` if the configuration has them."""
    kinds = fields.get("layer_types")
    return [kind == "sliding_attention" for kind in kinds] if isinstance(kinds, list) else otherwise


def _layers(fields: Fields) -> range:
    count = whole(fields, "num_hidden_layers")
    return range(min(count, 1 << 12))


def _mistral(fields: Fields) -> dict[str, Any]:
    return _windows(fields, [True for _ in _layers(fields)], 4096)


def _qwen2(fields: Fields) -> dict[str, Any]:
    if not fields.get("use_sliding_window", False):
        return {}
    first = whole(fields, "max_window_layers", 28)
    return _windows(fields, _listed(fields, [layer >= first for layer in _layers(fields)]), 4096)


def _qwen3(fields: Fields) -> dict[str, Any]:
    return {"head_dim": whole(fields, "head_dim", 128)} | _qwen2(fields)


def _phi3(fields: Fields) -> dict[str, Any]:
    return _windows(fields, [True for _ in _layers(fields)])


def _gemma2(fields: Fields) -> dict[str, Any]:
    return {
        "head_dim": whole(fields, "head_dim", 256),
        "activation": activation(fields.get("hidden_activation") or "gelu_pytorch_tanh"),
        "attention_scale": max(number(fields, "query_pre_attn_scalar", 256), 1e-9) ** -0.5,
        "attention_softcap": number(fields, "attn_logit_softcapping", 0),
        "logit_softcap": number(fields, "final_logit_softcapping", 0),
        "embed_scale": float(max(whole(fields, "hidden_size"), 0)) ** 0.5,
        "tied": bool(fields.get("tie_word_embeddings", True)),
        **_windows(fields, _listed(fields, [layer % 2 == 0 for layer in _layers(fields)]), 4096),
    }


def _opt(fields: Fields) -> dict[str, Any]:
    if not fields.get("do_layer_norm_before", True) or fields.get("_remove_final_layer_norm", False):
        raise ModelError("this OPT model normalises after its blocks (350m), which is not supported; take another size")
    if fields.get("word_embed_proj_dim", fields.get("hidden_size")) != fields.get("hidden_size"):
        raise ModelError("this OPT model projects its embedding (350m), which is not supported; take another size")
    return {
        "norm": "layer",
        "norm_eps": 1e-5,
        "gated": False,
        "activation": activation(fields.get("activation_function", "relu")),
        "intermediate": whole(fields, "ffn_dim"),
        "inv_freq": (),
        "position_offset": 2,
        "tied": bool(fields.get("tie_word_embeddings", True)),
    }


def _gguf_gemma2(fields: Fields) -> dict[str, Any]:
    layers, hidden = whole(fields, "block_count"), whole(fields, "embedding_length")
    window = whole(fields, "attention.sliding_window", 4096)
    found = {
        "activation": "gelu_tanh",
        "attention_softcap": number(fields, "attn_logit_softcapping", 50),
        "logit_softcap": number(fields, "final_logit_softcapping", 30),
        "embed_scale": float(max(hidden, 0)) ** 0.5,
        "windows": tuple(window if layer % 2 == 0 else 0 for layer in range(min(layers, 1 << 12))),
    }
    if layers == 46:  # the 27B model scales by hidden / heads, which GGUF does not record
        found["attention_scale"] = (hidden / max(whole(fields, "attention.head_count"), 1)) ** -0.5
    return found


def _gguf_phi3(fields: Fields) -> dict[str, Any]:
    window = fields.get("attention.sliding_window")
    layers = min(whole(fields, "block_count"), 1 << 12)
    return {"windows": (whole(fields, "attention.sliding_window"),) * layers} if window else {}


FAMILIES = (
    Family(
        "llama",
        architectures=("LlamaForCausalLM",),
        gguf="llama",
        names=_llama_names(_LLAMA_ATTENTION, _LLAMA_FFN),
        gguf_names=_gguf_names(_GGUF_ATTENTION, _GGUF_FFN),
        interleaved=True,
    ),
    Family("mistral", ("MistralForCausalLM",), None, _llama_names(_LLAMA_ATTENTION, _LLAMA_FFN), settings=_mistral),
    Family(
        "qwen2",
        architectures=("Qwen2ForCausalLM",),
        gguf="qwen2",
        names=_llama_names(_QWEN2_ATTENTION, _LLAMA_FFN),
        gguf_names=_gguf_names(
            _GGUF_ATTENTION | {f"{part}.bias": f"blk.{{i}}.attn_{part}.bias" for part in ("q", "k", "v")}, _GGUF_FFN
        ),
        settings=_qwen2,
    ),
    Family(
        "qwen3",
        architectures=("Qwen3ForCausalLM",),
        gguf="qwen3",
        names=_llama_names(_QWEN3_ATTENTION, _LLAMA_FFN),
        gguf_names=_gguf_names(
            _GGUF_ATTENTION | {f"{part}_norm": f"blk.{{i}}.attn_{part}_norm.weight" for part in ("q", "k")}, _GGUF_FFN
        ),
        settings=_qwen3,
    ),
    Family(
        "phi3",
        architectures=("Phi3ForCausalLM",),
        gguf="phi3",
        names=_llama_names(_PHI3_ATTENTION, _PHI3_FFN),
        gguf_names=_gguf_names(
            _GGUF_ATTENTION | {part: f"blk.{{i}}.attn_qkv.weight[{part}]" for part in ("q", "k", "v")},
            _GGUF_FFN | {part: f"blk.{{i}}.ffn_up.weight[{part}]" for part in ("gate", "up")},
        ),
        settings=_phi3,
        gguf_settings=_gguf_phi3,
    ),
    Family(
        "gemma2",
        architectures=("Gemma2ForCausalLM",),
        gguf="gemma2",
        names=_llama_names(_GEMMA2_ATTENTION, _GEMMA2_FFN),
        gguf_names=_gguf_names(
            _GGUF_ATTENTION | {"post_norm": "blk.{i}.post_attention_norm.weight"},
            _GGUF_FFN | {"post_norm": "blk.{i}.post_ffw_norm.weight"},
        ),
        settings=_gemma2,
        gguf_settings=_gguf_gemma2,
        fold=1.0,
    ),
    Family(
        "opt",
        architectures=("OPTForCausalLM",),
        names=Names(
            "embed_tokens.weight",
            _OPT_ATTENTION,
            _OPT_FFN,
            {"norm": "final_layer_norm.weight", "norm.bias": "final_layer_norm.bias"},
            "lm_head.weight",
            positions="embed_positions.weight",
            prefixes=("model.decoder.", "decoder.", ""),
        ),
        settings=_opt,
    ),
)

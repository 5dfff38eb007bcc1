"""A plain reference for GGUF files: float64 logits from metadata and dequantised tensors, one head at a time.

The reference follows llama.cpp's model files, `llama-context.cpp` (YaRN's factors) and `ggml`'s rope, not TPI's
families.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
_PAIRS = ("llama", "smollm3", "granite", "arcee", "ernie4_5", "ernie4_5-moe", "mistral3")


class Reference:
    """A model of architecture `name`; `keys` are its metadata without the prefix, `tensors` its float values."""

    def __init__(self, name: str, keys: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        self.name, self.get = name, keys.get
        self.gemma, self.pairs = name in ("gemma2", "gemma3"), name in _PAIRS
        self.ffn_norm = "post_attention_norm" if name in ("seed_oss", "glm4moe") else "ffn_norm"
        self.tensors = {tensor: values.astype(np.float64) for tensor, values in tensors.items()}
        self.hidden, self.heads = keys["embedding_length"], keys["attention.head_count"]
        self.kv_heads = keys.get("attention.head_count_kv", self.heads)
        self.size = keys.get("attention.key_length", self.hidden // self.heads)
        self.eps = keys.get("attention.layer_norm_rms_epsilon") or keys["attention.layer_norm_epsilon"]
        self.late = name in ("hunyuan-dense", "hunyuan-moe")  # heads are normed after their rotation
        self.hybrid = name == "exaone4" and keys["block_count"] == 64
        self.granite = name in ("granite", "granitemoe")

    def logits(self, tokens: Sequence[int]) -> F64:
        """Return the logits `[tokens, vocab]` after each of `tokens`."""
        embedding, residual, divisor = self._scales()
        x = self.tensors["token_embd.weight"][list(tokens)] * embedding
        for layer in range(self.get("block_count", 0) - self.get("nextn_predict_layers", 0)):
            x = x + self._after(layer, "post_attention_norm", self._attention(layer, x)) * residual
            x = x + self._after(layer, "post_ffw_norm", self._ffn(layer, x)) * residual
        head = self.tensors.get("output.weight", self.tensors["token_embd.weight"])
        logits = self._normed(x, "output_norm.weight") @ head.T / divisor
        default = {"gemma2": 30.0}.get(self.name, 0.0)
        return self._capped(logits, self.get("final_logit_softcapping", default) if self.gemma else 0.0)

    def _after(self, layer: int, name: str, x: F64) -> F64:
        """Return the output `x` of a block; Gemma, OLMo 2 and EXAONE 4 apply a norm to it."""
        normed = self.gemma or self.name in ("olmo2", "exaone4")
        return self._normed(x, f"blk.{layer}.{name}.weight") if normed else x

    def _scales(self) -> tuple[float, float, float]:
        """Return the factors of the embedding and of the blocks' outputs, and the divisor of the logits."""
        if self.granite:
            scales = self.get("embedding_scale", 0) or 1.0, self.get("residual_scale", 0) or 1.0
            return *scales, self.get("logit_scale", 0.0)
        return math.sqrt(self.hidden) if self.gemma or self.name == "gemma" else 1.0, 1.0, 1.0

    def _normed(self, x: F64, name: str) -> F64:
        weight = self.tensors.get(name)
        return x if weight is None else x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * weight

    def _linear(self, layer: int, name: str, x: F64) -> F64:
        product: F64 = x @ self.tensors[f"blk.{layer}.{name}.weight"].T
        return product + self.tensors.get(f"blk.{layer}.{name}.bias", 0.0)

    def _capped(self, x: F64, cap: float) -> F64:
        capped: F64 = cap * np.tanh(x / cap) if cap else x
        return capped

    def _ffn(self, layer: int, x: F64) -> F64:
        x = self._normed(x, f"blk.{layer}.{self.ffn_norm}.weight")
        up = self._linear(layer, "ffn_up", x)
        if self.name == "arcee":
            return self._linear(layer, "ffn_down", np.maximum(up, 0) ** 2)
        if self.name == "phi3":
            gate, up = np.split(up, 2, axis=-1)
        else:
            gate = self._linear(layer, "ffn_gate", x)
        if self.gemma or self.name == "gemma":
            gate = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        else:
            gate = gate / (1 + np.exp(-gate))
        return self._linear(layer, "ffn_down", gate * up)

    def _attention(self, layer: int, x: F64) -> F64:
        q, k, v = self._qkv(layer, self._normed(x, f"blk.{layer}.attn_norm.weight"))
        if growth := self.get("attention.temperature_scale", 0.0):
            steps = np.floor(np.arange(len(x)) / self.get("rope.scaling.original_context_length", 0))
            q = q * (1 + growth * np.log(1 + steps))[:, None, None]
        scores = np.einsum("thd,shd->hts", q, np.repeat(k, self.heads // self.kv_heads, axis=1)) * self._scale()
        scores = self._capped(scores, self.get("attn_logit_softcapping", 50.0) if self.name == "gemma2" else 0)
        distance = np.arange(len(x))[:, None] - np.arange(len(x))
        window = self._window(layer)
        hidden = (distance < 0) | (distance >= window if window else False)
        weights = self._weights(layer, np.where(hidden, -np.inf, scores))
        mixed = np.einsum("hts,shd->thd", weights, np.repeat(v, self.heads // self.kv_heads, axis=1))
        return self._linear(layer, "attn_output", mixed.reshape(len(x), -1))

    def _weights(self, layer: int, scores: F64) -> F64:
        """Return the softmax of the scores of a layer."""
        return softmax(scores)

    def _qkv(self, layer: int, x: F64) -> list[F64]:
        """Return queries, keys and values, `[tokens, heads, size]`; queries and keys are rotated."""
        sizes = np.cumsum([self.heads * self.size, self.kv_heads * self.size])
        if self.name in ("phi3", "dbrx"):
            parts = np.split(self._linear(layer, "attn_qkv", x), sizes, axis=-1)
        else:
            parts = [self._linear(layer, f"attn_{part}", x) for part in "qkv"]
        q, k, v = (self._heads(layer, name, part) for name, part in zip("qkv", parts, strict=True))
        still = (self.name == "smollm3" and layer % 4 == 3) or (
            self.granite and not self.get("rope.scaling.finetuned", True)
        )
        still |= self.hybrid and not self._window(layer)
        q, k = (q, k) if still else (self._rotated(layer, q), self._rotated(layer, k))
        if self.late:
            q, k = (self._normed(x, f"blk.{layer}.attn_{part}_norm.weight") for part, x in (("q", q), ("k", k)))
        return [q, k, v]

    def _heads(self, layer: int, part: str, values: F64) -> F64:
        """Return heads `[tokens, heads, size]`, each normed if there is a norm (in OLMo 2, all heads at once)."""
        name = f"blk.{layer}.attn_{part}_norm.weight"
        if self.name == "olmo2":
            return self._normed(values, name).reshape(len(values), -1, self.size)
        if self.late:
            return values.reshape(len(values), -1, self.size)
        return self._normed(values.reshape(len(values), -1, self.size), name)

    def _scale(self) -> float:
        largest = (self.name, self.get("block_count")) in (("gemma2", 46), ("gemma3", 62))
        default = self.hidden // self.heads if largest else self.size
        return float(self.get("attention.scale", 0) or default**-0.5)

    def _window(self, layer: int) -> int:
        if self.gemma or self.hybrid or self.name in ("gpt-oss", "olmo2"):
            usual = {"gemma3": 6, "olmo2": 4, "exaone4": 4}.get(self.name, 2)
            pattern = self.get("attention.sliding_window_pattern", usual)
            slides = pattern[layer] if isinstance(pattern, list) else not pattern or layer % pattern < pattern - 1
            window = self.get("attention.sliding_window", 4096 if self.hybrid or self.name == "gemma2" else 0)
            return int(window) if slides else 0
        return int(self.get("attention.sliding_window", 0))

    def _rotated(self, layer: int, x: F64) -> F64:
        """Return `x` rotated as by ggml: neighbours form a pair in llama-like models (NORM), else halves (NEOX)."""
        count = self.get("rope.dimension_count", self.size)
        local = self.name in ("gemma3", "olmo2") and self._window(layer) > 0
        angles, scale = self._angles(len(x), count // 2, local)
        turn = (np.cos(angles) + 1j * np.sin(angles))[:, None] * scale
        rotary, rest = x[..., :count], x[..., count:]
        first, second = (rotary[..., ::2], rotary[..., 1::2]) if self.pairs else np.split(rotary, 2, axis=-1)
        turned = (first + 1j * second) * turn
        if self.pairs:
            pairs = np.stack([turned.real, turned.imag], -1).reshape(rotary.shape)
        else:
            pairs = np.concatenate([turned.real, turned.imag], -1)
        return np.concatenate([pairs, rest], -1)

    def _angles(self, tokens: int, pairs: int, local: bool) -> tuple[F64, float]:
        """Return angles `[tokens, pairs]` and the factor of cosine and sine; `local` angles have an unscaled base."""
        kind, base = self.get("rope.scaling.type", "linear"), self.get("rope.freq_base", 10000.0)
        factor = self.get("rope.scaling.factor", self.get("rope.scale_linear", 0.0)) or 1.0
        factor = 1.0 if kind == "none" or local else factor
        if local and self.name == "olmo2":
            return np.arange(tokens)[:, None] * base ** (-np.arange(pairs) / max(pairs, 1)), 1.0
        base = self.get("rope.freq_base_swa", 10000.0) if local else base
        given = self.get("rope.scaling.yarn_ext_factor", -1.0)
        extrapolated = given if given >= 0 else float(kind == "yarn")
        divisors = self.tensors.get("rope_factors_short.weight", self.tensors.get("rope_freqs.weight", 1.0))
        fast = np.arange(tokens)[:, None] * base ** (-np.arange(pairs) / max(pairs, 1)) / divisors
        if not extrapolated:
            own = self.get("rope.scaling.yarn_attn_factor", 1.0)
            return fast / factor, own * self.get("rope.scaling.attn_factor", 1.0)
        original = self.get("rope.scaling.original_context_length", 0) or self.get("context_length", 0)

        def dimension(turns: float) -> float:
            return 2 * pairs * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(0.0, math.floor(dimension(self.get("rope.scaling.yarn_beta_fast", 32.0))))
        high = min(2 * pairs - 1.0, math.ceil(dimension(self.get("rope.scaling.yarn_beta_slow", 1.0))))
        ramp = 1 - np.clip((np.arange(pairs) - low) / max(0.001, high - low), 0, 1)
        mixed = fast / factor * (1 - ramp * extrapolated) + fast * ramp * extrapolated
        return mixed, self._temperature(factor) * self.get("rope.scaling.attn_factor", 1.0)

    def _temperature(self, factor: float) -> float:
        def grown(weight: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

        context = grown(1.0) / grown(self.get("rope.scaling.yarn_log_multiplier", 0.0)) / (1 + 0.1 * math.log(factor))
        return context * (1 + 0.1 * math.log(factor))  # the latter is ggml's


def softmax(x: F64) -> F64:
    """Return the softmax of `x` over the last axis."""
    powers: F64 = np.exp(x - x.max(-1, keepdims=True))
    powers /= powers.sum(-1, keepdims=True)
    return powers

"""A plain reference for GGUF files with experts (llama.cpp's `build_moe_ffn`), and for latent attention."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.differential.gguf_expert_draws import NORMS
from tests.support.differential.gguf_reference import F64, Reference, softmax

_SIGMOID, _OF_THOSE_CHOSEN = 2, 3
_NORMALISED = (
    "mixtral",
    "qwen3moe",
    "dbrx",
    "granitemoe",
    "gpt-oss",
    "minimax-m2",
    "ernie4_5-moe",
    "hunyuan-moe",
)  # if the file does not say


class ExpertReference(Reference):
    """A `Reference` for a draw with experts."""

    def __init__(self, name: str, keys: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        super().__init__(name, keys, tensors)
        self.pairs = name in ("mixtral", "granitemoe", "deepseek2", "ernie4_5-moe")
        self.ffn_norm = NORMS.get(name, "ffn_norm")
        self.gating = self.get("expert_gating_func", 0) or (_SIGMOID if name in ("glm4moe", "minimax-m2") else 0)
        self.clip = self.get("attention.clamp_kqv", 0.0)

    def _normed(self, x: F64, name: str) -> F64:
        layer_norm = self.name == "dbrx" and name in self.tensors
        return super()._normed(x - x.mean(-1, keepdims=True) if layer_norm else x, name)

    def _ffn(self, layer: int, x: F64) -> F64:
        if f"blk.{layer}.ffn_gate_inp.weight" not in self.tensors:
            return super()._ffn(layer, x)
        x = self._normed(x, f"blk.{layer}.{self.ffn_norm}.weight")
        experts, weights = self._chosen(layer, x)
        out: F64 = np.zeros_like(x)
        for token, (row, shares) in enumerate(zip(experts, weights, strict=True)):
            for expert, share in zip(row, shares, strict=True):
                out[token] += share * self._expert(layer, expert, x[token])
        return out + self._shared(layer, x)

    def _chosen(self, layer: int, x: F64) -> tuple[npt.NDArray[np.int64], F64]:
        """Return the experts of each token, and their weights."""
        logits, gating = self._linear(layer, "ffn_gate_inp", x), self.gating
        scores = 1 / (1 + np.exp(-logits)) if gating == _SIGMOID else softmax(logits)
        ranked = self._grouped(scores + self.tensors.get(f"blk.{layer}.exp_probs_b.bias", 0.0))
        experts = np.argsort(-ranked, axis=1, kind="stable")[:, : self.get("expert_used_count")]
        weights = np.take_along_axis(scores, experts, axis=1)
        if gating == _OF_THOSE_CHOSEN:
            weights = softmax(np.take_along_axis(logits, experts, axis=1))
        if self.get("expert_weights_norm", self.name in _NORMALISED):
            weights = weights / weights.sum(1, keepdims=True)
        return experts, weights * (self.get("expert_weights_scale", 0.0) or 1.0)

    def _grouped(self, ranked: F64) -> F64:
        """Return `ranked` without the experts outside the best groups; a group counts by its two best experts."""
        groups, used = self.get("expert_group_count", 0), self.get("expert_group_used_count", 0)
        if groups < 2:
            return ranked
        grouped = ranked.reshape(len(ranked), groups, -1)
        worth = np.sort(grouped, axis=2)[:, :, -2:].sum(2)
        for token, row in enumerate(worth):
            grouped[token, np.argsort(-row, kind="stable")[used:]] = -np.inf
        return grouped.reshape(ranked.shape)

    def _expert(self, layer: int, expert: int, x: F64) -> F64:
        def product(part: str, values: F64) -> F64:
            bias = self.tensors.get(f"blk.{layer}.ffn_{part}_exps.bias")
            made: F64 = self.tensors[f"blk.{layer}.ffn_{part}_exps.weight"][expert] @ values
            return made if bias is None else made + bias[expert]

        gate, up = product("gate", x), product("up", x)
        if self.name == "gpt-oss":
            gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0) + 1
            return product("down", gate / (1 + np.exp(-1.702 * gate)) * up)
        return product("down", gate / (1 + np.exp(-gate)) * up)

    def _shared(self, layer: int, x: F64) -> F64 | float:
        if f"blk.{layer}.ffn_up_shexp.weight" not in self.tensors:
            return 0.0
        gate, up = self._linear(layer, "ffn_gate_shexp", x), self._linear(layer, "ffn_up_shexp", x)
        made = self._linear(layer, "ffn_down_shexp", gate / (1 + np.exp(-gate)) * up)
        scale = self.tensors.get(f"blk.{layer}.ffn_gate_inp_shexp.weight")
        return made if scale is None else made / (1 + np.exp(-(x @ scale)))[:, None]

    def _weights(self, layer: int, scores: F64) -> F64:
        """Return the softmax of the scores; a sink is one more score, without a value."""
        sinks = self.tensors.get(f"blk.{layer}.attn_sinks.weight")
        if sinks is None:
            return super()._weights(layer, scores)
        sink = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        return softmax(np.concatenate([scores, sink], -1))[..., :-1]

    def _heads(self, layer: int, part: str, values: F64) -> F64:
        """Return heads, normed over all heads at once if the norm is that long, and then clipped."""
        name = f"blk.{layer}.attn_{part}_norm.weight"
        whole = self.name in ("olmoe", "minimax-m2") and part != "v"
        values = self._normed(values, name) if whole else values
        values = np.clip(values, -self.clip, self.clip) if self.clip else values
        split = values.reshape(len(values), -1, self.size)
        return split if whole or self.late else self._normed(split, name)


class LatentReference(ExpertReference):
    """A reference for DeepSeek's attention: one latent vector is expanded to the keys and values of all heads."""

    def __init__(self, name: str, keys: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        super().__init__(name, keys, tensors)
        newer = "_mla" if "attention.key_length_mla" in keys else ""
        self.size, self.value = keys[f"attention.key_length{newer}"], keys[f"attention.value_length{newer}"]
        self.rope, self.rank, self.kv_heads = keys["rope.dimension_count"], keys["attention.kv_lora_rank"], self.heads

    def _qkv(self, layer: int, x: F64) -> list[F64]:
        own = self.size - self.rope
        q = self._query(layer, x).reshape(len(x), self.heads, self.size)
        latent, shared = np.split(self._linear(layer, "attn_kv_a_mqa", x), [self.rank], axis=-1)
        k, v = self._expanded(layer, self._normed(latent, f"blk.{layer}.attn_kv_a_norm.weight"), own)
        key = np.broadcast_to(self._rotated(layer, shared[:, None]), (len(x), self.heads, self.rope))
        turned = np.concatenate([q[..., :own], self._rotated(layer, q[..., own:])], -1)
        return [turned, np.concatenate([k, key], -1), v]

    def _query(self, layer: int, x: F64) -> F64:
        """Return queries, from the input or from a latent vector of queries."""
        if not self.get("attention.q_lora_rank", 0):
            return self._linear(layer, "attn_q", x)
        ranked = self._normed(self._linear(layer, "attn_q_a", x), f"blk.{layer}.attn_q_a_norm.weight")
        return self._linear(layer, "attn_q_b", ranked)

    def _expanded(self, layer: int, latent: F64, own: int) -> tuple[F64, F64]:
        """Return the keys and values of each head, which one tensor or two tensors expand."""
        if f"blk.{layer}.attn_kv_b.weight" in self.tensors:
            both = self._linear(layer, "attn_kv_b", latent).reshape(len(latent), self.heads, -1)
            return both[..., :own], both[..., own:]
        keys, values = (self.tensors[f"blk.{layer}.attn_{part}_b.weight"] for part in "kv")
        return np.einsum("tr,hrd->thd", latent, keys), np.einsum("tr,hdr->thd", latent, values)

    def _scale(self) -> float:
        factor = self.get("rope.scaling.factor", self.get("rope.scale_linear", 0.0)) or 1.0
        yarn = self.get("rope.scaling.type") == "yarn"
        sharper = 1 + self.get("rope.scaling.yarn_log_multiplier", 0.0) * math.log(factor) if yarn else 1.0
        return float(self.get("attention.scale", 0) or sharper**2 * self.size**-0.5)

    def _temperature(self, factor: float) -> float:
        return 1.0  # it is in the scale of scores


def reference(name: str, keys: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]]) -> Reference:
    """Return the reference for a draw."""
    if name == "deepseek2":
        return LatentReference(name, keys, tensors)
    experts = any(tensor.endswith("ffn_gate_inp.weight") for tensor in tensors)
    return (ExpertReference if experts else Reference)(name, keys, tensors)

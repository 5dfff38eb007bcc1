"""The steps of a block on tensors of the card. The caller has checked all arrays; vectors of specs are copied once."""

from dataclasses import fields
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from tpi.devices.cuda.activations import Activations
from tpi.devices.cuda.attention import CardBatch, Pages, append, finish_heads, hadamard_rotate, mix
from tpi.devices.cuda.backend import Tensor, launch, power
from tpi.devices.cuda.matrix import matrix
from tpi.devices.cuda.products import multiply
from tpi.devices.cuda.programs import activate, norms
from tpi.kernels.spec import AttentionSpec, FfnSpec, NormSpec

_NEURONS = 1024  # neurons that one program activates
Heads = tuple[Tensor, Tensor, Tensor]
"""Queries `[tokens, heads, head_dim]`, keys and values `[tokens, kv_heads, head_dim]`."""


class SpecVectors:
    """The arrays of specs on a device, each copied once and cached for as long as the spec lives."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._kept: WeakKeyDictionary[Any, dict[str, Tensor]] = WeakKeyDictionary()

    def of(self, spec: Any) -> dict[str, Tensor]:
        """Return the array fields of a spec as tensors on the device, by field name, without those that are None."""
        found = self._kept.get(spec)
        if found is None:
            values = {each.name: getattr(spec, each.name) for each in fields(spec)}
            arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
            found = self._kept[spec] = {name: self.to_device(array) for name, array in arrays.items()}
        return found

    def to_device(self, array: Any) -> Tensor:
        """Return a contiguous copy of an array on the device."""
        return torch.tensor(np.ascontiguousarray(array), device=self._device)

    def clear(self) -> None:
        """Release all arrays that this cache holds."""
        self._kept.clear()


def norm(vectors: SpecVectors, spec: NormSpec, x: Tensor) -> Tensor:
    """Return the norm of the hidden states `x`, float32 `[tokens, hidden]`."""
    if spec.kind == "none":
        return x
    own, out = vectors.of(spec), torch.empty_like(x)
    tokens, hidden = x.shape
    launch(
        norms.norm, (tokens,), x, own["weight"], own.get("bias", x), out, hidden, spec.eps, LAYER=spec.kind == "layer",
        BIASED="bias" in own, SIZE=power(hidden),
    )  # fmt: skip
    return out


def project(
    vectors: SpecVectors, spec: AttentionSpec, runs: tuple[Tensor, Tensor], x: Activations, positions: Tensor
) -> Heads:
    """Return queries, keys and values of the normalised input `x`; `runs` are the bytes of query and KV units."""
    own, rotary = vectors.of(spec), None
    query, kv = runs
    if len(spec.inv_freq):
        rotary = (positions, own["inv_freq"], spec.rope_scale)
    q = multiply(query, matrix(spec.query, "q"), x)
    k, v = (multiply(kv, matrix(spec.kv, name), x) for name in "kv")
    heads, kv_heads = (spec.heads, spec.head_dim), (spec.kv_heads, spec.head_dim)
    return (
        finish_heads(q, own.get("q_bias"), own.get("q_norm"), rotary, heads, spec.norm.eps),
        finish_heads(k, own.get("k_bias"), own.get("k_norm"), rotary, kv_heads, spec.norm.eps),
        finish_heads(v, own.get("v_bias"), None, None, kv_heads, spec.norm.eps),
    )


def attend(vectors: SpecVectors, spec: AttentionSpec, heads: Heads, pages: Pages, batch: CardBatch) -> Tensor:
    """Append keys and values to the pages, then return the attention of all heads, `[tokens, heads * head_dim]`."""
    queries, keys, values = heads
    if pages.format == "q4":
        queries, keys = hadamard_rotate(queries), hadamard_rotate(keys)
    append(pages, keys, values, batch)
    return mix(spec, vectors.of(spec)["kv_index"], queries, pages, batch)


def output(spec: AttentionSpec, query: Tensor, mixed: Tensor) -> Tensor:
    """Return the output projection of `mixed`, `[tokens, heads * head_dim]`, which is first padded to whole units.

    `query` is the bytes of the query units, which hold the part `o`.
    """
    weights = matrix(spec.query, "o")
    padding = weights.inputs - mixed.shape[1]
    padded = torch.nn.functional.pad(mixed, (0, padding)) if padding else mixed
    return multiply(query, weights, Activations(padded))


def feed_forward(vectors: SpecVectors, spec: FfnSpec, data: Tensor, x: Activations, index: Tensor | None) -> Tensor:
    """Return the output of a feed-forward block's local neurons for the normalised input `x`: `[tokens, hidden]`.

    `index` lists the neurons to use.
    """
    run = spec.neuron
    up = multiply(data, matrix(run, "up"), x, index)
    gate = multiply(data, matrix(run, "gate"), x, index) if spec.gated else up
    inner = _activated(vectors, spec, gate, up, index)
    return multiply(data, matrix(run, "down"), Activations(inner), index)


def _activated(vectors: SpecVectors, spec: FfnSpec, gate: Tensor, up: Tensor, index: Tensor | None) -> Tensor:
    own, out = vectors.of(spec), torch.empty_like(up)
    tokens, neurons = up.shape
    launch(
        activate.activate, (tokens, -(-neurons // _NEURONS)), gate, up, own.get("gate_bias", up), own.get("up_bias",
        up), up if index is None else index, out, neurons, spec.threshold, KIND=spec.activation, GATED=spec.gated,
        GATE_BIAS="gate_bias" in own, UP_BIAS="up_bias" in own, INDEXED=index is not None, SIZE=_NEURONS,
    )  # fmt: skip
    return out

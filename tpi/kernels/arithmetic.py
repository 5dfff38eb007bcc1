"""The arithmetic of the reference kernels: norms, rounding, products with packed weights, activations.

Slow and simple; each product dequantises the weights it reads. Arrays that do not fit raise `KernelError`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import cast

import numpy as np

from tpi.config import Format
from tpi.errors import KernelError
from tpi.kernels.recurrent.squares import apply_spread
from tpi.kernels.spec import F32, I32, U8, FfnSpec, NormSpec, Residual
from tpi.pack.builder.quantise import decode_part
from tpi.pack.layout import GROUP, RunLayout, is_quantised


def apply_norm(norm: NormSpec, x: F32) -> F32:
    """Return `x`, `[tokens, hidden]`, after the norm that `norm` describes."""
    if norm.kind == "none":
        return x
    if norm.kind == "rms":
        return rms_norm(x, norm.weight, norm.eps)
    return layer_norm(x, norm.weight, norm.bias, norm.eps)


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last axis; `x` is `[tokens, hidden]`."""
    mean = np.mean(np.square(x, dtype=np.float32), axis=-1, keepdims=True, dtype=np.float32)
    return np.asarray(x / np.sqrt(mean + np.float32(eps)) * weight, np.float32)


def layer_norm(x: F32, weight: F32, bias: F32 | None, eps: float) -> F32:
    """Return `(x - mean) / sqrt(variance + eps) * weight + bias` over the last axis; `x` is `[tokens, hidden]`."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    scaled = centred / np.sqrt(np.mean(np.square(centred), axis=-1, keepdims=True) + np.float32(eps)) * weight
    return np.asarray(scaled if bias is None else scaled + bias, np.float32)


def add_residual(residual: Residual, x: F32, total: F32) -> F32:
    """Return the hidden states after a block: `x` plus `total`, the block's sum over all nodes.

    The bias and the norms of `residual` are applied to `total` first.
    """
    return add_normed(residual, x, total, apply_norm)


def add_normed(residual: Residual, x: F32, total: F32, norm: Callable[[NormSpec, F32], F32]) -> F32:
    """Return what `add_residual` returns, with `norm` as the function that computes the norm of hidden states."""
    stacked = residual.stacked
    if residual.spread is not None:
        total = apply_spread(residual.spread, total, len(x))
    if stacked is not None:
        first, total = norm(stacked.first, total[: len(x)]), total[len(x) :]
    total = biased(total, residual.bias)
    if residual.norm is not None:
        total = norm(residual.norm, total)
    if stacked is not None:
        total = norm(stacked.both, first + total)
    total = x + total
    return total if residual.scale == 1 else total * np.float32(residual.scale)


def round_activations(x: F32, weights: Format) -> F32:
    """Return `x` as the integer kernels round it: int8 times one scale (largest magnitude / 127) per 32 values.

    For q8 weights, a second int8, in units of scale / 128, is added to the first.
    """
    steps = np.float32(128 if weights == "q8" else 1)
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    inverse = np.where(largest > 0, np.float32(127) / np.where(largest > 0, largest, 1), np.float32(0))
    rounded = np.rint(groups * inverse.astype(np.float32) * steps) / steps * (largest / np.float32(127))
    return np.asarray(rounded.reshape(x.shape), np.float32)


def dequantise(run: RunLayout, data: U8, part: str) -> F32:
    """Return the vectors of one part, `[units * width, hidden]` float32; `data` is the run's units, 1-D uint8."""
    check_data(data, run.units * run.unit_bytes)
    return decode_part(run.part(part), run, data.reshape(run.units, run.unit_bytes))


Observer = Callable[[RunLayout, str, F32], None]
"""A function that gets a run, the name of one of its parts, and the input that the part is multiplied with."""
_observer: ContextVar[Observer | None] = ContextVar("_observer", default=None)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Return a context manager within which this thread's reference kernels call `observer` before each product.

    Inputs are float32 `[tokens, inputs]`, before they are rounded. Products with tables are observed too.
    """
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def rows(run: RunLayout, data: U8, name: str, x: F32) -> F32:
    """Return `x`, `[tokens, hidden]`, times every row of a part: `[tokens, units * width]`."""
    if (observe := _observer.get()) is not None:
        observe(run, name, x)
    if is_quantised(run.part(name).format):
        x = round_activations(x, run.part(name).format)
    return np.asarray(x @ dequantise(run, data, name).T, np.float32)


def columns(run: RunLayout, data: U8, name: str, inner: F32) -> F32:
    """Return `inner`, `[tokens, units * width]`, times the columns of a part: `[tokens, hidden]`."""
    if (observe := _observer.get()) is not None:
        observe(run, name, inner)
    if run.layout == "tiled":
        inner = round_activations(inner, run.part(name).format)
    return np.asarray(inner @ dequantise(run, data, name), np.float32)


def sigmoid(x: F32) -> F32:
    """Return `1 / (1 + exp(-x))` of each value."""
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -88, 88))), np.float32)


def biased(values: F32, bias: F32 | None) -> F32:
    """Return `values` plus the bias, if there is one."""
    return values if bias is None else values + bias


def activate(spec: FfnSpec, gate: F32 | None, up: F32) -> F32:
    """Return `act(gate) * up`, or `act(up)` without a gate; drelu is `relu(gate) * relu(up)` (Bamboo)."""
    if gate is not None and spec.activation == "swiglu_clamped":
        return _clamped(gate, up, np.float32(spec.threshold), np.float32(spec.slope))
    if gate is None:
        return _activation(spec, up)
    return cast(F32, _activation(spec, gate) * (_activation(spec, up) if spec.activation == "drelu" else up))


def _clamped(gate: F32, up: F32, limit: np.float32, slope: np.float32) -> F32:
    """Return gpt-oss's clamped SwiGLU, `gate * sigmoid(slope * gate) * (up + 1)`; gate and |up| are at most `limit`."""
    gate, up, one = np.minimum(gate, limit), np.clip(up, -limit, limit), np.float32(1)
    return np.asarray(gate / (one + np.exp(np.minimum(-slope * gate, np.float32(88)))) * (up + one), np.float32)


def _activation(spec: FfnSpec, x: F32) -> F32:
    one, half = np.float32(1), np.float32(0.5)
    if spec.activation in ("relu", "drelu"):
        return np.asarray(np.maximum(x, np.float32(0)), np.float32)
    if spec.activation == "relu2":
        return np.asarray(np.square(np.maximum(x, np.float32(0))), np.float32)
    if spec.activation == "fatrelu":
        return np.asarray(np.where(x <= np.float32(spec.threshold), np.float32(0), x), np.float32)
    if spec.activation == "silu":
        return np.asarray(x / (one + np.exp(np.minimum(-x, np.float32(88)))), np.float32)
    if spec.activation == "gelu_tanh":
        inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
        return np.asarray(half * x * (one + np.tanh(inner)), np.float32)
    from scipy.special import erf

    return np.asarray(half * x * (one + erf(x * np.float32(np.sqrt(0.5)))), np.float32)


def check_range(what: str, values: I32, limit: int) -> None:
    """Raise KernelError, which names the values `what`, unless every value is an index below `limit`."""
    if len(values) and (values.min() < 0 or values.max() >= limit):
        raise KernelError(f"a {what} is outside 0..{limit - 1}")


def check_data(data: U8, expected: int) -> None:
    """Raise KernelError unless `data` is `expected` contiguous bytes."""
    if data.dtype != np.uint8 or data.ndim != 1 or data.size != expected or not data.flags.c_contiguous:
        raise KernelError(f"weights must be {expected} contiguous bytes, not {data.dtype} of shape {data.shape}")


def check_input(x: F32, hidden: int) -> int:
    """Return the number of tokens; raise KernelError unless `x` is contiguous float32 `[tokens, hidden]`."""
    if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != hidden or not x.flags.c_contiguous:
        raise KernelError(f"x must be contiguous float32 [tokens, {hidden}], not {x.dtype} of shape {x.shape}")
    return len(x)

"""Norms of hidden states, and rounding of activations to int8, as `tpi.kernels.arithmetic` defines them."""

import triton
import triton.language as tl


@triton.jit
def nearest(x):
    """Return `x` rounded to the nearest integer, ties to even; magnitudes must be under 2^22."""
    return (x + 12582912.0) - 12582912.0  # 1.5 * 2^23: float32 has no fractions there


@triton.jit
def norm(x, weight, bias, out, hidden, eps, LAYER: tl.constexpr, BIASED: tl.constexpr, SIZE: tl.constexpr):
    """Compute the norm of one token of `[tokens, hidden]` per program: LayerNorm if LAYER, else RMS norm.

    SIZE is at least `hidden`.
    """
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    inside = at < hidden
    values = tl.load(x + token * hidden + at, mask=inside, other=0.0)
    if LAYER:
        values = tl.where(inside, values - tl.sum(values, axis=0) / hidden, 0.0)
    power = tl.sum(values * values, axis=0) / hidden
    values = values / tl.sqrt(power + eps) * tl.load(weight + at, mask=inside, other=0.0)
    if BIASED:
        values += tl.load(bias + at, mask=inside, other=0.0)
    tl.store(out + token * hidden + at, values, mask=inside)


@triton.jit
def round_groups(x, codes, rest, scales, groups, GROUPS: tl.constexpr, REST: tl.constexpr):
    """Round `x`, `[tokens, groups * 32]`, to int8 `codes` times `scales`, `[tokens, groups]`.

    With REST, the values are (codes + rest / 128) * scales. A group with NaN or infinity gets the scale NaN, so that
    the result shows it.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inside = group < groups
    at = token * groups * 32 + group[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = tl.load(x + at, mask=inside[:, None], other=0.0)
    largest = tl.max(tl.abs(values), axis=1)
    inverse = tl.where(largest > 0, 127.0 / tl.where(largest > 0, largest, 1.0), 0.0)
    if REST:
        whole = nearest(values * inverse[:, None] * 128.0)
        high = nearest(whole * 0.0078125)
        tl.store(rest + at, (whole - high * 128.0).to(tl.int8), mask=inside[:, None])
    else:
        high = nearest(values * inverse[:, None])
    tl.store(codes + at, high.to(tl.int8), mask=inside[:, None])
    nothing = tl.sum(values * 0.0, axis=1)
    tl.store(scales + token * groups + group, largest / 127.0 + nothing, mask=inside)

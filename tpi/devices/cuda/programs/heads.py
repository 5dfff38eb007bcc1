"""Projected heads: bias, RMS norm of each head, rotation by the token's position (`tpi.kernels.paged.rope`)."""

import triton
import triton.language as tl


@triton.jit
def scaled(x, bias, weight, at, inside, head, head_dim, eps, BIASED: tl.constexpr, NORMED: tl.constexpr):
    """Return the values at the places `at` of a head, with bias and norm applied.

    The norm is over the whole head, so `at` must contain all of its `head_dim` places, in any order.
    """
    values = tl.load(x + at, mask=inside, other=0.0)
    if BIASED:
        values += tl.load(bias + head * head_dim + at, mask=inside, other=0.0)
    if NORMED:
        values = values / tl.sqrt(tl.sum(values * values, axis=0) / head_dim + eps)
        values *= tl.load(weight + at, mask=inside, other=0.0)
    return values


@triton.jit
def finish_heads(
    x, bias, weight, positions, inv_freq, out, width, head_dim, half, eps, rope_scale,
    BIASED: tl.constexpr, NORMED: tl.constexpr, ROTATED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Finish one head of one token per program: bias, norm and rotation.

    `x` is `[tokens, width]`, with the heads in sequence; `out` has no padding. The first `half` values are rotated
    against the next `half`; SIZE is at least `head_dim`.
    """
    token, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    at = tl.arange(0, SIZE)
    inside = at < head_dim
    begin = x + token.to(tl.int64) * width + head * head_dim
    values = scaled(begin, bias, weight, at, inside, head, head_dim, eps, BIASED, NORMED)
    if ROTATED:
        turned = at < 2 * half
        partner = tl.where(turned, tl.where(at < half, at + half, at - half), at)
        others = scaled(begin, bias, weight, partner, inside, head, head_dim, eps, BIASED, NORMED)
        angle = tl.load(positions + token).to(tl.float32) * tl.load(inv_freq + at % half, mask=turned, other=0.0)
        cos, sin = tl.cos(angle) * rope_scale, tl.sin(angle) * rope_scale
        values = tl.where(turned, tl.where(at < half, values * cos - others * sin, values * cos + others * sin), values)
    place = (token.to(tl.int64) * heads + head) * head_dim
    tl.store(out + place + at, values, mask=inside)

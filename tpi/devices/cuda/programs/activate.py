"""The activations of a feed-forward block: see `tpi.kernels.arithmetic.activate`."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """From the exponential of -2|x|, which cannot overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def activation(x, KIND: tl.constexpr):
    """relu, silu, gelu (by the error function) or gelu_tanh of float32."""
    if KIND == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == "silu":
        return x / (1.0 + tl.exp(tl.minimum(-x, 88.0)))
    elif KIND == "gelu_tanh":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))  # sqrt(2 / pi)
    else:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def activate(
    gate, up, gate_bias, up_bias, index, out, neurons,
    KIND: tl.constexpr, GATED: tl.constexpr, GATE_BIAS: tl.constexpr, UP_BIAS: tl.constexpr, INDEXED: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """`out` = act(gate) * up, or act(up), of `[tokens, neurons]`; the biases are those of `index` if INDEXED."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = place < neurons
    neuron = tl.load(index + place, mask=inside, other=0) if INDEXED else place
    values = tl.load(up + token * neurons + place, mask=inside, other=0.0)
    if UP_BIAS:
        values += tl.load(up_bias + neuron, mask=inside, other=0.0)
    if GATED:
        gates = tl.load(gate + token * neurons + place, mask=inside, other=0.0)
        if GATE_BIAS:
            gates += tl.load(gate_bias + neuron, mask=inside, other=0.0)
        values *= activation(gates, KIND)
    else:
        values = activation(values, KIND)
    tl.store(out + token * neurons + place, values, mask=inside)

"""The activations of a feed-forward block, as `tpi.kernels.arithmetic.activate` defines them."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Return tanh(x), computed from exp(-2|x|), which cannot overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def relu(x):
    """Return max(x, 0); NaN in, NaN out."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activation(x, threshold, KIND: tl.constexpr):
    """Return the activation KIND of float32 `x`.

    `threshold` is fatrelu's. gelu uses erf, gelu_tanh the approximation with tanh.
    """
    if KIND == "relu" or KIND == "drelu":
        return relu(x)
    elif KIND == "relu2":
        return relu(x) * relu(x)
    elif KIND == "fatrelu":
        return tl.where(x <= threshold, 0.0, x)
    elif KIND == "silu":
        return x / (1.0 + tl.exp(tl.minimum(-x, 88.0)))
    elif KIND == "gelu_tanh":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))  # sqrt(2 / pi)
    else:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def activate(
    gate, up, gate_bias, up_bias, index, out, neurons, threshold,
    KIND: tl.constexpr, GATED: tl.constexpr, GATE_BIAS: tl.constexpr, UP_BIAS: tl.constexpr, INDEXED: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Set `out`, `[tokens, neurons]`, to act(gate) * up, or act(up) without a gate; drelu: act(gate) * act(up).

    The biases are those of the neurons that `index` lists if INDEXED.
    """
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
        if KIND == "drelu":
            values = relu(values)
        values *= activation(gates, threshold, KIND)
    else:
        values = activation(values, threshold, KIND)
    tl.store(out + token * neurons + place, values, mask=inside)

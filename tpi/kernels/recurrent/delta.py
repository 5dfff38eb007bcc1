"""Gated DeltaNet in the reference kernels (Yang et al. 2024, arXiv:2412.06464, section 3).

Queries, keys and values of all tokens pass a causal convolution and SiLU. Queries and keys are scaled to length 1,
queries also by `key ** -0.5`. A token then changes the state S, `[key, value]`, of each value head, and reads it:

    S = exp(g) S;  S = S + k (beta (v - k S));  out = q S
    g = decay * softplus(a x + decay_bias);  beta = sigmoid(b x)

The block's output is `o` times the RMS norm of `out` (over a head) times SiLU(gate).
"""

import numpy as np

from tpi.kernels.arithmetic import rms_norm, sigmoid
from tpi.kernels.recurrent.states import continued, convolve, sequences
from tpi.kernels.spec import F32, Batch, DeltaSpec

_EPS = np.float32(1e-6)  # added to the squared length of queries and keys, as in the model's own code


def mix(spec: DeltaSpec, projected: F32, normed: F32, gate: F32, states: F32, batch: Batch) -> F32:
    """Return the results of the value heads, normed and gated: `[tokens, heads * value]`. Write the states.

    Args:
        spec: the heads.
        projected: queries, keys and values before the convolution, `[tokens, channels]`.
        normed: the block's normed input, `[tokens, hidden]`.
        gate: `[tokens, heads * value]`.
        states: one layer of `tpi.kernels.kv.States`.
        batch: the tokens; those of a sequence are neighbours.
    """
    beta = sigmoid(normed @ spec.b.T)
    decay = np.exp(spec.decay * np.logaddexp(np.float32(0), normed @ spec.a.T + spec.decay_bias))
    out = np.empty((len(normed), spec.heads, spec.value), np.float32)
    for step in sequences(spec, states, batch):
        state, inputs, gates = continued(spec, states, step, projected, np.stack([decay, beta], axis=1))
        q, k, v = _convolved(spec, inputs)
        for at, (faded, strength) in enumerate(gates):
            if at == step.applied:
                state = state.copy()  # later tokens do not change what was stored
            state *= faded[:, None, None]
            change = strength[:, None] * (v[at] - np.einsum("hk,hkv->hv", k[at], state))
            state += k[at][:, :, None] * change[:, None, :]
            if at >= step.taken:
                out[step.tokens.start + at - step.taken] = np.einsum("hk,hkv->hv", q[at], state)
    gated = rms_norm(out, spec.out_norm, spec.norm.eps) * _silu(gate.reshape(out.shape))
    return np.ascontiguousarray(gated.reshape(len(normed), -1), np.float32)


def _convolved(spec: DeltaSpec, inputs: F32) -> tuple[F32, F32, F32]:
    """Return q, k and v after the convolution and SiLU, with q and k scaled.

    `inputs` is `[taps - 1 + tokens, channels]`; q and k are `[tokens, heads, key]`, v is `[tokens, heads, value]`.
    """
    weights, tokens = np.concatenate([spec.conv_q, spec.conv_k, spec.conv_v]), len(inputs) - spec.taps + 1
    mixed = _silu(convolve(inputs, weights))
    width = spec.key_heads * spec.key
    q, k = (mixed[:, at : at + width].reshape(tokens, spec.key_heads, spec.key) for at in (0, width))
    q, k = (x / np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + _EPS) for x in (q, k))
    q = q * np.float32(spec.key**-0.5)
    return q[:, spec.key_index], k[:, spec.key_index], mixed[:, 2 * width :].reshape(tokens, spec.heads, spec.value)


def _silu(x: F32) -> F32:
    return np.asarray(x * sigmoid(x), np.float32)

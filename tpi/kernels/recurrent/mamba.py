"""Mamba2 in the reference kernels (Dao and Gu 2024, arXiv:2405.21060, section 7).

B, C and x of all tokens pass a causal convolution, with a bias, and SiLU. B and C belong to groups of heads. A token
changes the state S, `[key, value]`, of each head, and reads it:

    S = exp(decay t) S + B (t x);  out = C S + skip x
    t = softplus(a input + decay_bias), within limits

The block's output is `o` times the RMS norm of `out * SiLU(gate)`, over the heads of each group.
"""

import numpy as np

from tpi.kernels.arithmetic import rms_norm, sigmoid
from tpi.kernels.recurrent.states import continued, convolve, sequences
from tpi.kernels.spec import F32, Batch, MambaSpec


def mix(spec: MambaSpec, projected: F32, normed: F32, gate: F32, states: F32, batch: Batch) -> tuple[F32, F32]:
    """Return the results of the heads, gated and normed, `[tokens, heads * value]`. Write the states.

    Also return the sum of squares of each token's results before the norm, `[tokens]`. If the norm is spread over
    nodes, the results are only multiplied by the norm's weights.

    Args:
        spec: the heads.
        projected: C, B and x before the convolution, `[tokens, channels]`.
        normed: the block's normed input, `[tokens, hidden]`.
        gate: `[tokens, heads * value]`.
        states: one layer of `tpi.kernels.kv.States`.
        batch: the tokens; those of a sequence are neighbours.
    """
    steps = np.logaddexp(np.float32(0), normed @ spec.a.T + spec.decay_bias)
    steps = np.clip(steps, np.float32(spec.least_step), np.float32(spec.most_step))
    decay = np.exp(spec.decay * steps)
    out = np.empty((len(normed), spec.heads, spec.value), np.float32)
    for step in sequences(spec, states, batch):
        state, inputs, gates = continued(spec, states, step, projected, np.stack([decay, steps], axis=1))
        q, k, v = _convolved(spec, inputs)
        for at, (faded, size) in enumerate(gates):
            if at == step.applied:
                state = state.copy()  # later tokens do not change what was stored
            state *= faded[:, None, None]
            state += k[at][:, :, None] * (size[:, None] * v[at])[:, None, :]
            if at >= step.taken:
                mixed = np.einsum("hk,hkv->hv", q[at], state) + spec.skip[:, None] * v[at]
                out[step.tokens.start + at - step.taken] = mixed
    results = out.reshape(len(normed), -1) * gate * sigmoid(gate)
    squares = np.square(results).sum(axis=1)
    if spec.spread is not None:
        return results * spec.out_norm, squares
    groups = (spec.key_heads, -1)
    mixed = rms_norm(results.reshape(len(normed), *groups), spec.out_norm.reshape(groups), spec.out_eps)
    return np.ascontiguousarray(mixed.reshape(len(normed), -1)), squares


def _convolved(spec: MambaSpec, inputs: F32) -> tuple[F32, F32, F32]:
    """Return q, k and v after the convolution, its bias and SiLU.

    `inputs` is `[taps - 1 + tokens, channels]`; q and k are `[tokens, heads, key]`, v is `[tokens, heads, value]`.
    """
    mixed = convolve(inputs, np.concatenate([spec.conv_q, spec.conv_k, spec.conv_v]))
    mixed = mixed if spec.conv_bias is None else mixed + spec.conv_bias
    mixed = mixed * sigmoid(mixed)
    tokens, width = len(mixed), spec.key_heads * spec.key
    q, k = (mixed[:, at : at + width].reshape(tokens, spec.key_heads, spec.key) for at in (0, width))
    return q[:, spec.key_index], k[:, spec.key_index], mixed[:, 2 * width :].reshape(tokens, spec.heads, spec.value)

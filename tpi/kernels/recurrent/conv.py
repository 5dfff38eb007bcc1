"""Gated short convolutions in the reference kernels (LFM2).

Three products of the normed input x have one value for each channel: v, input and gate. The block's output is

    o (gate * c),  c = the causal convolution over time of input * v, in each channel
"""

import numpy as np

from tpi.kernels.recurrent.states import begin, convolve, sequences
from tpi.kernels.spec import F32, Batch, ConvSpec


def mix(spec: ConvSpec, inputs: F32, gate: F32, states: F32, batch: Batch) -> F32:
    """Return the gated convolution of `inputs`, `[tokens, channels]`. Write the states.

    Args:
        spec: the channels.
        inputs: input * v, `[tokens, channels]`.
        gate: `[tokens, channels]`.
        states: one layer of `tpi.kernels.kv.States`.
        batch: the tokens; those of a sequence are neighbours.
    """
    out = np.empty_like(inputs)
    for step in sequences(spec, states, batch):
        before = begin(states, step.read).reshape(-1, spec.channels)[: spec.taps - 1 + step.taken]
        all_inputs = np.concatenate([before, inputs[step.tokens]])
        out[step.tokens] = convolve(all_inputs, spec.weights)[step.taken :]
        kept = all_inputs[step.applied :].reshape(-1)
        states[step.write, : len(kept)] = kept
    return out * gate

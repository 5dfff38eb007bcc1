"""Feed-forward blocks that compute the gate first, and then only the neurons whose gate is large (CATS, TEAL, WINA).

The gate is a run of its own (`tpi.pack.builder.plan.plan_pack`), and its product with the input is computed whole. Up
is multiplied with the activation of the gate: where that is small, the neuron adds little. `GatedKernels` can leave
such neurons out; the functions of this module define their results.
"""

from typing import Protocol, runtime_checkable

import numpy as np

from tpi.errors import KernelError
from tpi.kernels.arithmetic import activate, biased, check_data, check_range, columns, rows
from tpi.kernels.constants import STREAM_TOKENS
from tpi.kernels.spec import F32, I32, U8, FfnSpec, Input
from tpi.pack.layout import RunLayout


@runtime_checkable
class GatedKernels(Protocol):
    """Kernels (`tpi.kernels.Kernels`) that can choose neurons by their gate."""

    def ffn(self, spec: FfnSpec, data: U8, x: Input, active: I32 | None = None) -> F32:
        """Return a segment's share of a feed-forward block, as `tpi.kernels.Kernels.ffn`."""

    def ffn_gated(self, spec: FfnSpec, data: U8, x: Input, least: F32) -> tuple[F32, int]:
        """Return a segment's share of a block, as `Kernels.ffn`, and the number of neurons that were computed.

        A neuron is computed for all tokens if the magnitude of its activation is at least its `least`, `[neurons]`, for
        one of them. In a step of more than `STREAM_TOKENS` tokens all neurons are computed.

        Raises:
            KernelError: if the gate of `spec` is not a run of its own.
        """


def activations(spec: FfnSpec, data: U8, normed: F32) -> F32:
    """Return act(gate), which multiplies each neuron's up: `[tokens, neurons]`, for `normed` `[tokens, hidden]`."""
    gate, gate_data, _ = _split(spec, data)
    return activate(spec, None, biased(rows(gate, gate_data, "gate", normed), spec.gate_bias))


def called_for(spec: FfnSpec, data: U8, normed: F32, least: F32) -> I32:
    """Return the indices of the neurons that `GatedKernels.ffn_gated` computes, in ascending order."""
    counts = ~(np.abs(activations(spec, data, normed)) < least)  # a NaN counts as large
    if len(normed) > STREAM_TOKENS:
        counts[:] = True
    return np.flatnonzero(counts.any(axis=0)).astype(np.int32)


def gated_ffn(spec: FfnSpec, data: U8, normed: F32, active: I32 | None = None) -> F32:
    """Return the share of a block whose gate is a run of its own, `[tokens, hidden]`.

    `active` lists the neurons to use; None: all of them.
    """
    run, (_, _, rest) = spec.neuron, _split(spec, data)
    up = biased(rows(run, rest, "up", normed), spec.up_bias)
    inner = np.asarray(activations(spec, data, normed) * up, np.float32)
    return columns(run, rest, "down", inner if active is None else only_active(run, active, inner))


def only_active(run: RunLayout, active: I32, inner: F32) -> F32:
    """Return `inner`, `[tokens, neurons]`, with zeros for neurons that are not active."""
    if run.layout != "record":
        raise KernelError("a list of active neurons needs a pack in the record layout; this one is tiled")
    check_range("active neuron", active, run.units * run.width)
    mask = np.zeros(run.units * run.width, np.bool_)
    mask[active] = True
    return np.asarray(np.where(mask, inner, np.float32(0)), np.float32)


def _split(spec: FfnSpec, data: U8) -> tuple[RunLayout, U8, U8]:
    """Return the gate's run, its bytes, and the bytes of the neurons."""
    if spec.gate is None:
        raise KernelError("neurons can be chosen by their gate only if it is a run of its own; call ffn() instead")
    end = spec.gate.units * spec.gate.unit_bytes
    check_data(data, end + spec.neuron.units * spec.neuron.unit_bytes)
    return spec.gate, data[:end], data[end:]

"""Feed-forward blocks gate first: of up and down only the neurons that their gate calls for (CATS, TEAL, WINA).

The gate is a run of its own (`tpi.pack.builder.plan.plan_pack`), whose product with the input is computed whole. After
the activation it is what up is multiplied with: where that is small, so is what the neuron adds.
`GatedKernels` are those that can leave such neurons out; the functions here say what that means.
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
    """`tpi.kernels.Kernels` that choose neurons by their gate."""

    def ffn(self, spec: FfnSpec, data: U8, x: Input, active: I32 | None = None) -> F32:
        """See `tpi.kernels.Kernels`."""

    def ffn_gated(self, spec: FfnSpec, data: U8, x: Input, least: F32) -> tuple[F32, int]:
        """As `Kernels.ffn`, for a spec whose gate is a run of its own; and how many neurons were computed.

        A neuron is computed for all tokens if for one of them the magnitude of its activation is at least its `least`,
        `[neurons]`. More than `STREAM_TOKENS` tokens compute all.

        Raises:
            KernelError: if the gate is no run of its own.
        """


def activations(spec: FfnSpec, data: U8, normed: F32) -> F32:
    """What each neuron's up is multiplied with: act(gate), `[tokens, neurons]`, for `normed` `[tokens, hidden]`."""
    gate, gate_data, _ = _split(spec, data)
    return activate(spec, None, biased(rows(gate, gate_data, "gate", normed), spec.gate_bias))


def called_for(spec: FfnSpec, data: U8, normed: F32, least: F32) -> I32:
    """The neurons that `GatedKernels.ffn_gated` computes, in order."""
    counts = ~(np.abs(activations(spec, data, normed)) < least)  # a NaN is seen
    if len(normed) > STREAM_TOKENS:
        counts[:] = True
    return np.flatnonzero(counts.any(axis=0)).astype(np.int32)


def gated_ffn(spec: FfnSpec, data: U8, normed: F32, active: I32 | None = None) -> F32:
    """A block of up and down alone, times activations that are computed before: `[tokens, hidden]`."""
    run, (_, _, rest) = spec.neuron, _split(spec, data)
    up = biased(rows(run, rest, "up", normed), spec.up_bias)
    inner = np.asarray(activations(spec, data, normed) * up, np.float32)
    return columns(run, rest, "down", inner if active is None else only_active(run, active, inner))


def only_active(run: RunLayout, active: I32, inner: F32) -> F32:
    """`inner` `[tokens, neurons]` with zeros where a neuron is not active."""
    if run.layout != "record":
        raise KernelError("a list of active neurons needs a pack in the record layout; this one is tiled")
    check_range("active neuron", active, run.units * run.width)
    mask = np.zeros(run.units * run.width, np.bool_)
    mask[active] = True
    return np.asarray(np.where(mask, inner, np.float32(0)), np.float32)


def _split(spec: FfnSpec, data: U8) -> tuple[RunLayout, U8, U8]:
    """The gate's run and its bytes, and those of the neurons."""
    if spec.gate is None:
        raise KernelError("neurons are chosen by their gate where that is a run of its own; this is no such")
    end = spec.gate.units * spec.gate.unit_bytes
    check_data(data, end + spec.neuron.units * spec.neuron.unit_bytes)
    return spec.gate, data[:end], data[end:]

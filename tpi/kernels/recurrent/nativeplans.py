"""The plans of the C++ kernels for blocks with states, kept in their specs."""

from __future__ import annotations

import numpy as np

from tpi.kernels import _native
from tpi.kernels.nativefields import PLAN, norm_fields, run_fields
from tpi.kernels.recurrent.spec import ConvSpec, DeltaSpec, HeadsSpec, RecurrentSpec
from tpi.kernels.spec import F32


def plan_recurrent(spec: RecurrentSpec) -> _native.RecurrentPlan:
    """Return the C++ plan of a block with states, which the first call makes and caches in `spec`."""
    plan: _native.RecurrentPlan | None = vars(spec).get(PLAN)
    if plan is None:
        plan = vars(spec)[PLAN] = _new(spec)
    return plan


def _new(spec: RecurrentSpec) -> _native.RecurrentPlan:
    if isinstance(spec, ConvSpec):
        shape = (spec.channels, spec.taps)
        return _native.ConvPlan(run_fields(spec.values), norm_fields(spec.norm), shape, _flat(spec.weights))
    if isinstance(spec, DeltaSpec):
        return _native.DeltaPlan(*_heads(spec), (*_vectors(spec, spec.b), spec.out_norm))
    vectors = (*_vectors(spec, None), spec.out_norm, spec.conv_bias, spec.skip)
    return _native.MambaPlan(*_heads(spec), vectors, (spec.out_eps, spec.least_step, spec.most_step))


def _heads(
    spec: HeadsSpec,
) -> tuple[_native.RunFields, _native.RunFields, _native.NormFields, tuple[int, int, int, int, int], _native.I32]:
    shape = (spec.heads, spec.key_heads, spec.key, spec.value, spec.taps)
    return run_fields(spec.values), run_fields(spec.keys), norm_fields(spec.norm), shape, spec.key_index


def _vectors(spec: HeadsSpec, b: F32 | None) -> tuple[F32 | None, ...]:
    matrices = (spec.a, b, spec.decay, spec.decay_bias, spec.conv_q, spec.conv_k, spec.conv_v)
    return tuple(None if matrix is None else _flat(matrix) for matrix in matrices)


def _flat(matrix: F32) -> F32:
    return np.ascontiguousarray(matrix).reshape(-1)

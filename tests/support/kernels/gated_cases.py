"""Random feed-forward blocks whose gate is a run of its own, and floors that both implementations agree on."""

from dataclasses import replace

import numpy as np

from tests.support.kernels.kernel_cases import FfnCase, Random, ffn_case, layout_of, norm_spec, normal, pack
from tpi.config import Activation, Format
from tpi.kernels.arithmetic import apply_norm
from tpi.kernels.gated import activations
from tpi.kernels.spec import F32, FfnSpec
from tpi.pack.layout import Part


def gated_case(
    random: Random,
    *,
    format: Format = "f32",
    hidden: int = 64,
    units: int = 3,
    tokens: int = 1,
    activation: Activation = "silu",
    bias: bool = False,
) -> FfnCase:
    """A block in the layout of a pack that is made gate first."""
    gate, gate_data = pack(random, "gate", layout_of(format), [Part("gate", format, "row")], 32, hidden, units)
    parts = [Part("up", format, "row"), Part("down", format, "column")]
    run, data = pack(random, "neuron", "record", parts, 32, hidden, units)
    gate_bias, up_bias = (normal(random, 32 * units) if bias else None for _ in range(2))
    norm = norm_spec(random, "rms", hidden)
    spec = FfnSpec(run, activation, True, norm, gate_bias, up_bias, gate=gate)
    return FfnCase(spec, np.concatenate([gate_data, data]), normal(random, tokens, hidden))


def plain_case(case: FfnCase, random: Random) -> FfnCase:
    """A block of the same shape in the layout of an ordinary pack."""
    spec = case.spec
    made = ffn_case(random, format=spec.neuron.parts[0].format, hidden=spec.hidden, units=spec.neuron.units)
    return replace(made, x=case.x)


def floors(case: FfnCase, share: float) -> F32:
    """`[neurons]`: what leaves about `share` of them out, between two activations that no rounding exchanges."""
    found = np.abs(activations(case.spec, case.data, apply_norm(case.spec.norm, case.x))).max(axis=0)
    ordered = np.sort(found)
    at = round(share * len(ordered))
    around = range(max(1, at - 8), min(len(ordered), at + 8))
    widest = max(around, key=lambda place: float(ordered[place] - ordered[place - 1]))
    middle = 0.5 * (ordered[widest] + ordered[widest - 1])
    return np.full(len(found), middle, np.float32)

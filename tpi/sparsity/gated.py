"""A feed-forward block computed gate first: up and down only for the neurons whose gate calls for it. The meaning of
what kernels do with a pack whose gate is a run of its own (`tpi.pack.builder.plan.plan_pack`)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tpi.kernels.arithmetic import activate, apply_norm, biased, columns, rows
from tpi.kernels.spec import FfnSpec
from tpi.pack.layout import RunLayout

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Active = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class GatedBlock:
    """Some units of a block: its gate's run and bytes, and in `spec.neuron` and `data` its up and down.

    `weights`, `[neurons]`, is what an activation of 1 counts for: the lengths of the columns of down.
    """

    spec: FfnSpec
    gate: RunLayout
    gate_data: U8
    data: U8
    weights: F32

    def activations(self, x: F32) -> F32:
        """act(gate) of `x` `[tokens, hidden]`, which is not normed yet: `[tokens, neurons]`."""
        normed = apply_norm(self.spec.norm, x)
        product = biased(rows(self.gate, self.gate_data, "gate", normed), self.spec.gate_bias)
        return activate(self.spec, None, product)

    def called_for(self, x: F32, threshold: float) -> Active:
        """`[tokens, neurons]`: which count for at least `threshold`."""
        return np.asarray(np.abs(self.activations(x)) * self.weights >= np.float32(threshold))

    def compute(self, x: F32, active: Active) -> F32:
        """What the active neurons come to, `[tokens, hidden]`, before bias and residual."""
        run, normed = self.spec.neuron, apply_norm(self.spec.norm, x)
        up = biased(rows(run, self.data, "up", normed), self.spec.up_bias)
        gate = biased(rows(self.gate, self.gate_data, "gate", normed), self.spec.gate_bias)
        inner = np.where(active, activate(self.spec, gate, up), np.float32(0))
        return columns(run, self.data, "down", np.asarray(inner, np.float32))

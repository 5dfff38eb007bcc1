"""A feed-forward block on an OpenCL device."""

from typing import Any

from tpi.config import Activation
from tpi.devices.opencl.card import LANES, OpenClCard
from tpi.devices.opencl.compute.activations import CardActivations
from tpi.devices.opencl.compute.products import columns, matrix_of, rows
from tpi.devices.opencl.programs import Program
from tpi.kernels.spec import I32, U8, FfnSpec

_ELEMENTWISE = Program(("elementwise",))
_NUMBERS: dict[Activation, int] = {  # as in elementwise.cl
    "silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "fatrelu": 5, "drelu": 6,
}  # fmt: skip


class FeedForwardBlock:
    """A feed-forward block: the vectors of its spec on the card, and its computation."""

    def __init__(self, card: OpenClCard, spec: FfnSpec) -> None:
        """Copy the vectors of `spec` to the card. Later calls must pass the same `spec`."""
        self._card = card
        self._gate_bias = None if spec.gate_bias is None else card.upload(spec.gate_bias)
        self._up_bias = None if spec.up_bias is None else card.upload(spec.up_bias)

    def run(self, spec: FfnSpec, data: U8, x: CardActivations, active: I32 | None) -> Any:
        """Return a buffer with the output, `[tokens, hidden]`; `active` lists the neurons to use (None: all)."""
        listed = None if active is None else self._card.upload(active)
        return self.output(spec, data, self.inner(spec, data, x, listed, active), listed)

    def inner(
        self, spec: FfnSpec, data: U8, x: CardActivations, listed: Any = None, active: I32 | None = None
    ) -> CardActivations:
        """Return the neurons' values, `[tokens, neurons]`; `listed` is `active` in a buffer, or None."""
        card, run = self._card, spec.neuron
        count = run.units * run.width if active is None else len(active)
        up = rows(card, matrix_of(card, run, "up", data), x, listed, count)
        gate = rows(card, matrix_of(card, run, "gate", data), x, listed, count) if spec.gated else None
        biases = (self._gate_bias, self._up_bias)
        kind, work = (_NUMBERS[spec.activation], float(spec.threshold)), [-(-count * x.tokens // LANES)]
        card.launch(_ELEMENTWISE, "activate", work, gate, up, *biases, listed, count, x.tokens, *kind)
        return CardActivations(card, up, x.tokens, count)

    def output(self, spec: FfnSpec, data: U8, inner: CardActivations, listed: Any = None) -> Any:
        """Return a buffer with the output, `[tokens, hidden]`, of the values that `inner` returned."""
        return columns(self._card, matrix_of(self._card, spec.neuron, "down", data), inner, listed, inner.width)

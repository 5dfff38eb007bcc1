"""A forecast, measured when a node starts, of whether computing only a token's active neurons saves time."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt

from tpi.devices.pages import Bytes
from tpi.kernels import Kernels
from tpi.kernels.spec import FfnSpec

F32 = npt.NDArray[np.float32]
Clock = Callable[[], float]
_REPEATED = 5  # measurements of each call; the shortest counts


@dataclass(frozen=True)
class SparsityForecast:
    """The times of one feed-forward block for one token, in seconds.

    Attributes:
        everything: time to compute all neurons.
        predicting: time to predict the active neurons.
        active: time to compute as many neurons as are expected to be predicted.
        share: these neurons as a share of all.
    """

    everything: float
    predicting: float
    active: float
    share: float

    @property
    def pays(self) -> bool:
        """True if predicting and computing the active neurons takes less time than computing all neurons."""
        return self.predicting + self.active < self.everything

    def describe(self) -> str:
        """Return a sentence for the user that says why sparsity is off; empty if it is not."""
        if self.pays:
            return ""
        whole, sparse = (1e3 * seconds for seconds in (self.everything, self.predicting + self.active))
        return (
            f"sparsity is off, it does not pay here: a feed-forward block takes {whole:.3f} ms with all neurons, and "
            f"{sparse:.3f} ms with the {self.share:.0%} that would be predicted, of which predicting takes "
            f"{self.predicting / (self.predicting + self.active):.0%}"
        )


def measure_forecast(
    kernels: Kernels,
    spec: FfnSpec,
    data: Bytes,
    predict: Callable[[F32], object],
    share: float,
    clock: Clock = perf_counter,
) -> SparsityForecast:
    """Time one block with all neurons, its prediction, and the expected `share` of its neurons, evenly spread.

    Args:
        kernels: the kernels to time.
        spec: the block.
        data: the block's weights.
        predict: predicts the active neurons for an input float32 `[1, hidden]`.
        share: expected share of the neurons that are predicted, from 0 to 1.
        clock: returns seconds.
    """
    neurons, x = spec.neuron.units * spec.neuron.width, np.zeros((1, spec.neuron.hidden), np.float32)
    some = np.unique(np.linspace(0, neurons - 1, max(1, round(share * neurons))).astype(np.int32))
    calls: list[Callable[[], object]] = [
        lambda: kernels.ffn(spec, data, x), lambda: predict(x), lambda: kernels.ffn(spec, data, x, some),
    ]  # fmt: skip
    rounds = [[_timed(call, clock) for call in calls] for _ in range(_REPEATED)]
    everything, predicting, active = (min(times) for times in zip(*rounds, strict=True))
    return SparsityForecast(everything, predicting, active, share)


def _timed(call: Callable[[], object], clock: Clock) -> float:
    began = clock()
    call()
    return clock() - began

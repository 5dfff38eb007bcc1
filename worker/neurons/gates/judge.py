"""Whether computing gate first pays on this machine: measured by turns against the ordinary pack, in whose tiles all
neurons are fastest. Both are of the same bytes, whatever they say: times do not depend on weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt

from tpi.block import ffn_spec
from tpi.config import ModelConfig
from tpi.devices.pages import Bytes, page_buffer
from tpi.kernels.gated import GatedKernels
from tpi.kernels.spec import FfnSpec
from tpi.pack.blockfile import BlockShape
from tpi.partition import Range
from tpi.sparsity.gates import NEVER

F32 = npt.NDArray[np.float32]
_SAMPLE = 48 << 20  # bytes of blocks that pass by turns: more than most caches keep
_REPEATED = 5
_FILL = 0x3C  # as every byte of the weights: numbers of a usual size in each format


@dataclass(frozen=True)
class Compared:
    """Seconds of a token's feed-forward blocks: with all neurons in the ordinary pack, and gate first."""

    plain: float
    gated: float


def compare_layouts(
    kernels: GatedKernels,
    config: ModelConfig,
    layouts: tuple[BlockShape, BlockShape],
    nodes: int,
    skipped: Sequence[float],
) -> Compared:
    """For one of `nodes` that share the neurons, where of each layer the share `skipped` is left out.

    `layouts` are of a feed-forward block: of the ordinary pack, and of one that is made gate first. Takes some 48 MiB
    for a moment; the fastest of a few rounds counts.
    """
    most = max(spec_bytes(_spec(config, shape, nodes)) for shape in layouts)
    pieces = max(1, -(-2 * most // _SAMPLE))  # of large blocks that many times less is computed
    plain, first = (_spec(config, shape, nodes * pieces) for shape in layouts)
    sizes = [spec_bytes(spec) for spec in (plain, first)]
    count = min(len(skipped), max(2, _SAMPLE // max(sizes)))
    data = page_buffer(count * max(sizes))
    data.fill(_FILL)
    wholes, parts = ([data[at * size : (at + 1) * size] for at in range(count)] for size in sizes)
    x, least = np.ones((1, plain.hidden), np.float32), _floors(first, float(np.mean(skipped)))
    turns = [
        (
            _timed(wholes, lambda one: kernels.ffn(plain, one, x)),
            _timed(parts, lambda one: kernels.ffn_gated(first, one, x, least)),
        )
        for _ in range(_REPEATED)
    ]
    whole, some = (min(each) * pieces * len(skipped) / count for each in zip(*turns, strict=True))
    return Compared(whole, some)


def spec_bytes(spec: FfnSpec) -> int:
    """Bytes of the weights of a block."""
    return sum(run.units * run.unit_bytes for run in (spec.gate, spec.neuron) if run is not None)


def _spec(config: ModelConfig, shape: BlockShape, nodes: int) -> FfnSpec:
    """Of a node's neurons of a block; what its norm and biases are makes no difference."""
    neuron = shape.run("neuron")
    vectors = {name: np.ones(length, np.float32) for name, length in shape.vectors}
    gate = shape.run("gate") if shape.gate_first else None
    return ffn_spec(config, neuron, vectors, Range(0, max(1, neuron.units // nodes)), gate)


def _floors(spec: FfnSpec, skipped: float) -> F32:
    """Which neurons are left out is as good as random, as in a model."""
    count = spec.neuron.units * spec.neuron.width
    left_out = np.random.default_rng(0).random(count) < skipped
    return np.asarray(np.where(left_out, NEVER, 0), np.float32)


def _timed(blocks: Sequence[Bytes], call: Callable[[Bytes], object]) -> float:
    began = perf_counter()
    for one in blocks:
        call(one)
    return perf_counter() - began

"""Figures 4 and 5 of MoE-Lightning as charts: attention and neurons of a model under the roofs of a machine."""

from collections.abc import Iterator

from master.planning.chart import Mark, RooflineChart, Slope
from scheduler.model.roofline.layer import LayerShape
from scheduler.model.roofline.levels import Hierarchy
from scheduler.model.roofline.policy import BatchPolicy, BatchProblem
from tpi.kernels.kv import KvDtype, vector_bytes

_FORMATS: tuple[KvDtype, ...] = ("f16", "q8", "q4")  # formats of keys and values
_BATCHES = (1, 32, 128, 1024, 4096)  # batch sizes in tokens, drawn in addition to the policy's batch
_PROCESSORS = {"RAM": "CPU"}
_GIGA = 1e9


def charts_of(problem: BatchProblem, policy: BatchPolicy, head_dim: int) -> list[RooflineChart]:
    """Return the charts of attention and of neurons."""
    hierarchy = Hierarchy.of(problem.machine)
    return [_attention(hierarchy, problem, head_dim), _neurons(hierarchy, problem.layer, policy)]


def _attention(hierarchy: Hierarchy, problem: BatchProblem, head_dim: int) -> RooflineChart:
    """Return the chart of attention, whose intensity depends on the format of keys and values, not on the batch."""
    layer = problem.layer
    values = layer.heads - layer.mixed  # bytes of a token's keys and values in float32
    lines = []
    for kv in _FORMATS:
        nbytes = values / (4 * head_dim) * vector_bytes(head_dim, kv)
        lines.append((f"{kv} keys and values", layer.pair / nbytes))
    return _chart("Attention of a token (figure 4)", hierarchy, lines, lines[0][1])


def _neurons(hierarchy: Hierarchy, layer: LayerShape, policy: BatchPolicy) -> RooflineChart:
    """Return the chart of neurons.

    A larger batch computes more with each byte that crosses the link, a larger micro-batch with each byte that is read.
    """

    def intensity(tokens: float) -> float:
        return 2.0 * tokens * layer.token_weights / float(layer.touched(tokens))

    own = f"N = {policy.batch}"
    batches = {tokens: str(tokens) for tokens in _BATCHES} | {policy.batch: own}
    lines = [(label, intensity(tokens)) for tokens, label in sorted(batches.items())]
    return _chart("Neurons, by tokens of a batch (figure 5)", hierarchy, lines, intensity(policy.micro_batch), policy)


def _chart(
    title: str, hierarchy: Hierarchy, lines: list[tuple[str, float]], own: float, policy: BatchPolicy | None = None
) -> RooflineChart:
    computing = [level for level in hierarchy.levels if level.operations]
    levels = [
        (f"{_PROCESSORS.get(level.name, level.name)} computes {level.operations / _GIGA:.0f}", level.operations)
        for level in computing
    ]
    slopes = [Slope(f"{level.name} {level.read / _GIGA:.0f} GB/s", level.read, level.operations) for level in computing]
    for at, rate in enumerate(hierarchy.links):
        upper, lower = hierarchy.levels[at : at + 2]
        slopes.append(Slope(f"{lower.name} to {upper.name} {rate / _GIGA:.1f} GB/s", rate, upper.operations))
    marks = list(_marks(hierarchy, own)) if len(computing) > 1 else []
    if policy is not None and marks:
        reached = hierarchy.local(0, own)
        levels.append((f"mu = {policy.micro_batch} reaches {reached / _GIGA:.0f}", reached))
    return RooflineChart(title, slopes, levels, lines, marks)


def _marks(hierarchy: Hierarchy, own: float) -> Iterator[Mark]:
    """Yield the turning points P1 and P2 for computing bytes in RAM on the accelerator.

    `own` is the intensity, in operations per byte, of the same work with bytes in the accelerator's memory.
    """
    points, link = hierarchy.turning_points(0, own, 1), hierarchy.between(0, 1)
    if points.move > 0:
        yield Mark("P1", points.move, link * points.move)
    yield Mark("P2", points.arrive, link * points.arrive)

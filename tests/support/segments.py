"""The computation of one segment outside a block loop."""

from tpi.kernels.spec import Batch
from worker.node.microbatch import MicroBatch
from worker.node.order import COMPUTE
from worker.node.segment import F32, Bytes, Segment


def compute(segment: Segment, data: Bytes, x: F32, batch: Batch) -> F32:
    """Compute one segment for `x` `[tokens, hidden]`, and return its partial result `[tokens, hidden]`."""
    partial = segment.start(COMPUTE, data, MicroBatch(x, batch), lambda _: x)
    assert partial is not None  # COMPUTE includes OUTPUT
    return partial.wait()

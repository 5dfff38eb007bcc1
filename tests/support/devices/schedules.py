"""The other schedules of MoE-Lightning's figure 6: S2 and S3, where the host attends, and S4 as FlexGen has it.

In all of them what passes through of a block's weights goes over the link as a whole, so that whatever else crosses
waits for all of it: that is planned (`as_a_whole`), and then followed.
"""

from collections.abc import Callable, Sequence

from worker.pipelines.accelerated import BatchAccelerated
from worker.pipelines.orders import Interleaved, Layerwise
from worker.pipelines.pipeline import BatchSchedule
from worker.plan.case import Candidate, Case
from worker.plan.chunks import Chunking
from worker.plan.modes.batch import BatchSettings, planned

WHOLE = 1 << 40  # bytes: more than any layer has
Attends = tuple[bool, ...]


def fastdecode(attends: Attends, micro_batch: int) -> BatchSchedule:
    """S2: the host attends beside the accelerator, as in FastDecode."""
    return BatchSchedule(micro_batch, True, Interleaved(attends))


def flexgen_host(attends: Attends, micro_batch: int) -> BatchSchedule:
    """S3: FlexGen(c), where each micro-batch waits for its attention on the host."""
    return BatchSchedule(micro_batch, True, Interleaved(attends, ahead=0))


def flexgen(attends: Attends, micro_batch: int) -> BatchSchedule:
    """S4: FlexGen, where the accelerator attends, and loads one micro-batch's keys and values beside another's use.

    FlexGen itself also waits for everything after each micro-batch, which this does not: it is the kinder comparison.
    """
    return BatchSchedule(micro_batch, False, Layerwise(attends))


SCHEDULES: dict[str, Callable[[Attends, int], BatchSchedule]] = {
    "S2, FastDecode's": fastdecode,
    "S3, FlexGen(c)'s": flexgen_host,
    "S4, FlexGen's": flexgen,
}


def as_a_whole(case: Case) -> Candidate[BatchSettings]:
    """What a node decides by itself, but that what passes through of a layer is one chunk."""
    return planned(case, Chunking(1))


def follow(link: BatchAccelerated, name: str) -> None:
    """Have a node keep one of `SCHEDULES` from now on, with the micro-batches that it has; it was planned for that."""
    assert link.settings.chunking.count == 1, "heads would go over the link between two chunks"
    pipeline = link.pipeline
    attends: Sequence[bool] = pipeline.attends
    link.use_schedule(SCHEDULES[name](tuple(attends), pipeline.schedule.micro_batch), WHOLE)

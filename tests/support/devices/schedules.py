"""The other schedules of MoE-Lightning's figure 6: S2 and S3, where the host attends, and S4 as FlexGen has it.

In all these schedules, the streamed weights of a block cross the link as a whole, and all other transfers wait for
them. Plan with `as_a_whole`, then call `follow`.
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
    """Return S2: the host attends while the accelerator computes, as in FastDecode."""
    return BatchSchedule(micro_batch, True, Interleaved(attends))


def flexgen_host(attends: Attends, micro_batch: int) -> BatchSchedule:
    """Return S3: FlexGen(c), in which each micro-batch waits for its attention on the host."""
    return BatchSchedule(micro_batch, True, Interleaved(attends, ahead=0))


def flexgen(attends: Attends, micro_batch: int) -> BatchSchedule:
    """Return S4: FlexGen; the accelerator attends, and loads keys and values while another micro-batch computes.

    FlexGen itself also waits for all work after each micro-batch. This schedule does not, and so is faster.
    """
    return BatchSchedule(micro_batch, False, Layerwise(attends))


SCHEDULES: dict[str, Callable[[Attends, int], BatchSchedule]] = {
    "S2, FastDecode's": fastdecode,
    "S3, FlexGen(c)'s": flexgen_host,
    "S4, FlexGen's": flexgen,
}


def as_a_whole(case: Case) -> Candidate[BatchSettings]:
    """Return the node's own plan, with the streamed weights of each layer as one chunk."""
    return planned(case, Chunking(1))


def follow(link: BatchAccelerated, name: str) -> None:
    """Make a node follow one of `SCHEDULES` from now on; its plan must be from `as_a_whole`."""
    assert link.settings.chunking.count == 1, "heads would go over the link between two chunks"
    pipeline = link.pipeline
    attends: Sequence[bool] = pipeline.attends
    use_schedule(link, SCHEDULES[name](tuple(attends), pipeline.schedule.micro_batch), WHOLE)


def use_schedule(link: BatchAccelerated, schedule: BatchSchedule, chunk_bytes: int) -> None:
    """Use `schedule` from the next step on, and copy weights in parts of at most `chunk_bytes` bytes.

    The chunks of experts stay as the plan has cut them (`BatchSettings.chunking`); a larger `chunk_bytes` does not join
    them.
    """
    link.pipeline.schedule = schedule
    if link._rings is not None:
        link._rings.chunk = chunk_bytes

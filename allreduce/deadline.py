"""How long a member is waited for."""

from time import monotonic

from allreduce.base import GroupSpec, Watch
from tpi.errors import NodeLost


def extend(spec: GroupSpec, watch: Watch | None, rank: int, deadline: float) -> float:
    """The deadline (`monotonic` seconds; 0: none yet) of a wait for `rank` that got nothing so far.

    Raises:
        NodeLost: if it has passed, and `watch` sees no progress of that node.
    """
    progress = watch is not None and watch(rank)
    if progress or not deadline:
        return monotonic() + spec.timeout_s
    if monotonic() < deadline:
        return deadline
    name = spec.peers[rank].name
    raise NodeLost(
        name,
        f"{name} (rank {rank}) did not answer for {spec.timeout_s:g} s during a sum; "
        "check that it is running and can be reached, then start again",
    )

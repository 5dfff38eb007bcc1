"""Where LRU keeps nothing: as soon as a cache holds less than one token uses, blocks being used in a cycle.

What is used longest ago is then what comes next. Policies that count have no such cliff.
"""

from scheduler.demand.policies import PolicyChoice
from tpi.errors import PlanError

GUARDED = PolicyChoice("importance")  # where nothing was recorded: no cliff, and within some percent of LRU above it


def require_sense(choice: PolicyChoice, slots: int, per_step: float, unit_bytes: int) -> None:
    """Refuse a cache that would keep nothing until it is used again.

    `per_step` is how many units a token uses; `unit_bytes` is the size of a slot.

    Raises:
        PlanError: if `choice` is LRU in fewer slots than a token uses; says how many bytes would do.
    """
    if choice.kind != "lru" or slots >= per_step:
        return
    room, needed = slots * unit_bytes, -(-int(per_step * unit_bytes) >> 20)
    raise PlanError(
        f"LRU would keep nothing: a token uses {per_step:g} units and {room >> 20}MiB have room for {slots}, so each "
        f"is gone before it is used again; choose a policy that counts uses, or give the cache {needed}MiB"
    )


def sensible(choice: PolicyChoice, slots: int, per_step: float) -> PolicyChoice:
    """`choice`, or one that counts uses where LRU would keep nothing."""
    return GUARDED if choice.kind == "lru" and slots < per_step else choice

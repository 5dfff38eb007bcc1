"""Where LRU keeps nothing: as soon as a cache holds less than one token uses, blocks being used in a cycle.

What is used longest ago is then what comes next. Policies that count have no such cliff.
"""

from scheduler.demand.policies import PolicyChoice

GUARDED = PolicyChoice("importance")  # where nothing was recorded: no cliff, and within some percent of LRU above it


def sensible(choice: PolicyChoice, slots: int, per_step: float) -> PolicyChoice:
    """`choice`, or one that counts uses where LRU would keep nothing."""
    return GUARDED if choice.kind == "lru" and slots < per_step else choice

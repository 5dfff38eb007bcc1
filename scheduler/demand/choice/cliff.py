"""The cliff of LRU: it has no hits if a cache holds less than one token uses.

Blocks are used in a cycle, so the unit that was used longest ago is the one that is used next. Policies that count
uses have no such cliff.
"""

from scheduler.demand.policies import PolicyChoice

DEFAULT_POLICY = PolicyChoice("importance")  # without a recording: no cliff, and within a few percent of LRU above it


def without_lru_cliff(choice: PolicyChoice, slots: int, per_step: float) -> PolicyChoice:
    """Return `choice`, or a policy that counts uses if `choice` is LRU and `slots` are fewer than a step uses."""
    return DEFAULT_POLICY if choice.kind == "lru" and slots < per_step else choice

"""The cliff of the LRU policy: if a cache has room for fewer units than one token uses, LRU has no hits.

Blocks are used in a cycle, so the unit that was used longest ago is used next. Policies that count
uses have no such cliff.
"""

from scheduler.demand.policies import PolicyChoice

DEFAULT_POLICY = PolicyChoice("importance")  # without a recording: no cliff, and within a few percent of LRU above it


def without_lru_cliff(choice: PolicyChoice, slots: int, per_step: float) -> PolicyChoice:
    """Return `choice`, or `DEFAULT_POLICY` if `choice` is LRU and a step uses more units than there are `slots`.

    `per_step` is the mean number of units that a step uses.
    """
    return DEFAULT_POLICY if choice.kind == "lru" and slots < per_step else choice

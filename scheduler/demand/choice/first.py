"""What lies in a cache before anything was used: what the policy would keep, if it had seen what was recorded."""

from collections.abc import Sequence

import numpy as np

from scheduler.demand.choice.replay import Recording
from scheduler.demand.policies import Key, Policy, PolicyChoice


def warmed(choice: PolicyChoice, keys: Sequence[Key], recording: Recording | None = None) -> Policy:
    """The policy for units `keys`, which has heard of all of a recording. Errors as `PolicyChoice.open`."""
    policy = choice.open(np.array([block for block, _ in keys], np.int64))
    for step in recording.steps if recording is not None else ():
        policy.begin()
        for units in step:
            policy.use(units)
    return policy


def worthiest(policy: Policy, keys: Sequence[Key], count: int) -> list[Key]:
    """So many units, those that the policy would keep; of equals the same of every block. In order of blocks."""
    worth = policy.worth(np.arange(len(keys)))
    blocks, units = np.array(keys, np.int64).reshape(-1, 2).T
    chosen = np.lexsort((blocks, units, -worth))[:count]
    return [keys[unit] for unit in sorted(chosen.tolist())]

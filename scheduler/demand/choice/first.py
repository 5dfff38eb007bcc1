"""The initial content of a cache: the units that its policy would keep after the recorded uses."""

from collections.abc import Sequence

import numpy as np

from scheduler.demand.choice.replay import Recording
from scheduler.demand.policies import Key, Policy, PolicyChoice


def trained_policy(choice: PolicyChoice, keys: Sequence[Key], recording: Recording | None = None) -> Policy:
    """Return a new policy for the units `keys`; if a `recording` is given, the policy is told all of its uses first.

    Errors are those of `PolicyChoice.open`.
    """
    policy = choice.open(np.array([block for block, _ in keys], np.int64))
    for step in recording.steps if recording is not None else ():
        policy.begin()
        for units in step:
            policy.use(units)
    return policy


def units_to_keep(policy: Policy, keys: Sequence[Key], count: int) -> list[Key]:
    """Return the keys of the `count` units with the highest priority, in the order of `keys`.

    Among units of equal priority, each block contributes about equally many, those with the lowest numbers first.
    """
    priority = policy.priority(np.arange(len(keys)))
    blocks, units = np.array(keys, np.int64).reshape(-1, 2).T
    chosen = np.lexsort((blocks, units, -priority))[:count]
    return [keys[unit] for unit in sorted(chosen.tolist())]

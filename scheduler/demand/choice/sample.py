"""Less of a recording, where all of it would take too long to replay: some layers, with their part of the room.

A cache of all layers gives each of them room by what its units are worth, so that evenly spread layers with their part
of the room behave as all of them do, as a sample of the addresses does in C. A. Waldspurger et al., Efficient MRC
Construction with SHARDS, FAST 2015. What is kept whole is time: policies differ in what they make of many tokens.
"""

import numpy as np

from scheduler.demand.choice.replay import Recording

MOST_USES = 8192  # of blocks, that a choice replays: a policy takes 20 to 45 us for one, and there are six replays


def sampled(recording: Recording, slots: int, most_uses: int = MOST_USES) -> tuple[Recording, int]:
    """At most about so many uses of a recording, and the room that is theirs of `slots`."""
    blocks = np.unique(recording.blocks)
    count = most_uses * len(blocks) // max(1, len(recording.uses))
    if count >= len(blocks):
        return recording, slots
    count = max(1, count)
    kept = blocks[(2 * np.arange(count) + 1) * len(blocks) // (2 * count)]
    units = np.flatnonzero(np.isin(recording.blocks, kept))
    number = np.full(len(recording.blocks), -1)
    number[units] = np.arange(len(units))
    steps = (tuple(number[use] for use in step if len(use) and number[use[0]] >= 0) for step in recording.steps)
    room = max(1, round(slots * len(units) / len(number)))
    return Recording(recording.blocks[units], tuple(steps)), room

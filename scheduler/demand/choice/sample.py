"""A sample of a recording that is too long to replay: some layers, with their part of the slots.

All layers share the slots of a cache, by the priority of their units. A sample of evenly spread layers, in a cache that
is smaller in proportion, has about the same hit rate as all layers. (C. A. Waldspurger et al., Efficient MRC
Construction with SHARDS, FAST 2015, sample addresses in the same way.) All steps are kept, because policies differ in
their behaviour over time.
"""

import numpy as np

from scheduler.demand.choice.replay import Recording

MOST_USES = 8192  # uses that are replayed: a policy takes 20 to 45 us for each, and there are six replays


def sample_layers(recording: Recording, slots: int, most_uses: int = MOST_USES) -> tuple[Recording, int]:
    """Return a recording of evenly spread layers with about `most_uses` uses, and the slots that these layers would
    have.

    The slots are the layers' proportional part of `slots`.
    """
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

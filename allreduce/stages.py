"""Limits on the stages of a plan. This module imports nothing, because a worker without a plan uses it."""

from collections.abc import Sequence

MOST_STAGES = 32  # a lane number has 6 bits, and each stage takes two lanes


def most_in_flight(stages: Sequence[Sequence[int]]) -> int:
    """Return the maximum number of steps in flight: one for each stage, or one in total if a node is in several stages.

    `stages` are the ranks of each stage. A node of several stages computes one step after the other, each through all
    its stages.
    """
    ranks = [rank for stage in stages for rank in stage]
    return len(stages) if len(set(ranks)) == len(ranks) else 1

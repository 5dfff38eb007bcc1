"""Whether one policy is better than another, or only was so by chance: paired differences of windows of a recording."""

from scheduler.demand.policies import F64

WINDOWS = 8
_SURE = 4.029  # Student's t, one side, 7 degrees of freedom: 1% for four comparisons together (Bonferroni)


def clear_gain(some: F64, others: F64) -> float:
    """By how much `some` exceed `others` of the same `WINDOWS` windows at least; 0 or less: not clearly.

    The lower end of the one-sided confidence interval of the mean paired difference (Student, The probable error of a
    mean, Biometrika 6, 1908). Of fewer windows nothing is known.
    """
    if len(some) < WINDOWS:
        return 0.0
    differences = some - others
    return float(differences.mean() - _SURE * differences.std(ddof=1) / WINDOWS**0.5)

"""A test of whether one policy is better than another by more than chance, on windows of a recording."""

from scheduler.slots.table import F64

WINDOWS = 8  # parts of a recording that are compared pairwise
_SURE = 4.029  # Student's t, one-sided, 7 degrees of freedom: 1% for four comparisons together (Bonferroni)


def clear_gain(some: F64, others: F64) -> float:
    """Return a lower bound of the mean gain of the hit rates `some` over `others`; 0 or less if the gain may be chance.

    Both are hit rates in the same windows, float64 `[windows]`. The bound is the lower end of the one-sided confidence
    interval of the mean difference (Student, The probable error of a mean, Biometrika 6, 1908). With fewer than
    `WINDOWS` windows, the result is 0.
    """
    if len(some) < WINDOWS:
        return 0.0
    differences = some - others
    return float(differences.mean() - _SURE * differences.std(ddof=1) / WINDOWS**0.5)

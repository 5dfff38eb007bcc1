"""Mixed integer linear programs, solved by HiGHS through scipy."""

from typing import Any

from tpi.system.hidden import stdout_hidden


def solve_milp(objective: Any, **options: Any) -> Any:
    """Return the result of `scipy.optimize.milp`, with the same arguments, and hide the output of HiGHS.

    Some versions of HiGHS print a debugging line whatever their output options say.
    """
    from scipy.optimize import milp

    with stdout_hidden():
        return milp(objective, **options)
